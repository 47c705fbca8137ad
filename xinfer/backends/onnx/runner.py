"""The graph as a `ModelRunner` on the CPU: one row of the cache for each sequence."""

__all__ = ["OnnxRunner", "cuts"]

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx.build import build
from xinfer.backends.onnx.probe import probe
from xinfer.backends.onnx.providers import CPU, Providers
from xinfer.backends.onnx.threads import OneThread
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch, Limits
from xinfer.process_memory import ResidentMemory

log = logging.getLogger(__name__)

_BINDINGS = 64  # that are kept; one is 4 names a layer
# Tokens that could be computed in the time that a further call takes. SmolLM2 on one thread of two shared EPYC cores,
# ONNX Runtime 1.32, ms in float32 / int8: 16 drafts of 5 tokens in one call 235 / 186, each alone 583 / 304; 16 drafts
# of 1 to 6 tokens padded to 96 256 / 196, in three calls (60) 244 / 158, only single ones together 492 / 219; prompts
# of 20 to 60 tokens (319) padded to 480 1063 / 1205, in four calls (345) 810 / 907, each alone 860 / 890; a chunk of 32
# tokens and 8 single ones in one call 607 / 476, in two 136 / 90. So a call takes 10 tokens in float32, 3 to 6 in int8.
_CALL = 8


class OnnxRunner(ModelRunner):
    """Runs a graph step by step, each step by as few calls as pay.

    Where the operator can be told of lengths (`Form.ragged`), any sequences can share a call, padded to the longest.
    Elsewhere only those with one new token can, and those that are at their beginning.
    """

    def __init__(self, context: BackendContext, providers: Providers | None = None) -> None:
        self._memory = ResidentMemory()
        built = build(context, providers or [(CPU, {})])
        self._session, self._rows, self.info = built.session, built.rows, built.info
        self._ragged, self._joins = built.form.ragged, True
        names = {each.name for each in self._session.get_inputs()}
        self._inputs = frozenset(name for name in names if not name.startswith("past_key_values."))
        self._bindings: OrderedDict[tuple[int, int], _Bound] = OrderedDict()
        self._one_thread = OneThread()
        self._nowhere = torch.empty(1)  # where no logits go, for the runtime takes no null pointer
        if context.limits.invariant:
            self._make_invariant(context.limits)

    def _make_invariant(self, limits: Limits) -> None:
        """Find out what a row depends on, keep from doing what would change it, and report the rest."""
        started = perf_counter()
        self._ragged = False  # what has a past is tried by itself, or one token a sequence
        found = probe(self.forward, limits, self.info)
        self._joins = found.joined
        levels = {"rerun"} | ({"batch"} if found.batch else set())
        if found.batch and found.chunk:
            levels |= {"chunk", "preempt", "cache"}
        capabilities = self.info.capabilities | (set() if found.decode else {"decode_differs"})
        self.info = replace(self.info, levels=frozenset(levels), capabilities=capabilities)
        self._rows.free(range(self._rows.count))
        log.info("rows probed", extra={"seconds": perf_counter() - started, **asdict(found)})

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        self._one_thread.take()
        logits = torch.empty(len(batch.sample_at), self.info.vocab_size)
        for group in self._groups(batch):
            self._run(batch, group, logits)
        return logits

    def _groups(self, batch: Batch) -> Iterator[NDArray[np.integer]]:
        """Yield the sequences of the batch that one call computes together."""
        lengths = np.diff(batch.query_starts)
        past = batch.context_lens - lengths
        if lengths.max() == 1:
            yield np.arange(len(lengths))
            return
        # A row is to have room for as many new tokens as the longest of the call has.
        joins = past + lengths.max() <= self._rows.slots if self._ragged else (past == 0) & (lengths > 1)
        joins &= self._joins
        single = (lengths == 1) & ~joins
        if single.any():
            yield np.flatnonzero(single)
        for s in np.flatnonzero(~(joins | single)):
            yield np.array([s])
        if joins.any():
            together = np.flatnonzero(joins)
            together = together[np.argsort(lengths[together], kind="stable")]
            yield from np.split(together, cuts(lengths[together]))

    def _run(self, batch: Batch, group: NDArray[np.integer], logits: Tensor) -> None:
        """Compute the new tokens of a group's sequences, and what logits of the step belong to them."""
        blocks = batch.block_tables[group, 0]
        first = self._rows.gather(blocks)
        if len(group) > 1:
            order = np.argsort(self._rows.row_of[blocks])
            group, blocks = group[order], blocks[order]
        starts, contexts = batch.query_starts[group], batch.context_lens[group]
        lengths = batch.query_starts[group + 1] - starts
        # Rows shorter than the longest repeat their last token; what is computed of that is never looked at.
        tokens = starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        sampled, wanted = _sampled(batch, tokens)
        bound = self._binding(first, len(group))
        bound.feed("input_ids", batch.token_ids[tokens])
        bound.feed("last", contexts - 1)
        bound.feed("longest", contexts.max(keepdims=True))
        bound.feed("sample_at", sampled)
        bound.feed("position_ids", batch.positions[tokens].astype(np.int64))
        bound.feed("lengths", lengths)
        beside = wanted is None or (len(wanted) > 0 and wanted[-1] - wanted[0] == len(wanted) - 1)
        if wanted is None:
            out = logits
        else:
            out = logits[wanted[0] : wanted[-1] + 1] if beside else torch.empty(len(wanted), logits.shape[1])
        into = out if len(out) else self._nowhere
        bound.binding.bind_output("logits", "cpu", 0, np.float32, tuple(out.shape), into.data_ptr())
        self._session.run_with_iobinding(bound.binding)
        if not beside:
            logits[torch.from_numpy(wanted)] = out
        self._rows.filled[blocks] = np.maximum(self._rows.filled[blocks], contexts)

    def _binding(self, first: int, count: int) -> "_Bound":
        """Return what is bound to so many rows of the cache; those used last are kept."""
        bound = self._bindings.get((first, count))
        if bound is not None:
            self._bindings.move_to_end((first, count))
            return bound
        bound = self._bindings[first, count] = _Bound(self._session.io_binding(), self._inputs)
        for index, tensor in enumerate(self._rows.tensors):
            layer, part = index // 2, ("key", "value")[index % 2]
            rows = tensor[first : first + count]
            place = ("cpu", 0, self._rows.numpy_dtype, tuple(rows.shape), rows.data_ptr())
            bound.binding.bind_input(f"past_key_values.{layer}.{part}", *place)
            bound.binding.bind_output(f"present.{layer}.{part}", *place)
        if len(self._bindings) > _BINDINGS:
            self._bindings.popitem(last=False)
        return bound

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        self._rows.copy(source, target, tokens)

    def free(self, blocks: Sequence[int]) -> None:
        """See `ModelRunner.free`."""
        self._rows.free(blocks)

    def metrics(self) -> Mapping[str, Any]:
        """See `ModelRunner.metrics`."""
        return {"mem_used": self._memory()}

    def close(self) -> None:
        """Give back the memory."""
        self._one_thread.give_back()
        self._bindings.clear()
        del self._session
        self._rows.close()


class _Bound:
    """A binding, and the arrays that it points to: one of the same shape as before is copied, not bound anew."""

    def __init__(self, binding: ort.IOBinding, names: frozenset[str]) -> None:
        self.binding, self._names = binding, names
        self._held: dict[str, NDArray[np.generic]] = {}

    def feed(self, name: str, values: NDArray[np.generic]) -> None:
        """Set an input, if the graph has one of that name."""
        if name not in self._names:
            return
        held = self._held.get(name)
        if held is not None and held.shape == values.shape:
            held[...] = values
        else:
            self._held[name] = np.ascontiguousarray(values)
            self.binding.bind_cpu_input(name, self._held[name])


def _sampled(batch: Batch, tokens: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """Return which of a call's tokens [B, S] have logits [K], and whose rows of the step's these are; None for all."""
    if tokens.shape[1] == 1 and len(tokens) == len(batch.token_ids) == len(batch.sample_at):  # it only decodes
        return np.argsort(tokens[:, 0]).astype(np.int32), None
    place = np.full(len(batch.token_ids), -1, np.int32)
    place[tokens.ravel()[::-1]] = np.arange(tokens.size - 1, -1, -1)
    sampled = place[batch.sample_at]
    wanted = np.flatnonzero(sampled >= 0)
    return sampled[wanted], wanted


def cuts(lengths: NDArray[np.integer]) -> list[int]:
    """Return where to cut lengths [B], which ascend, into calls that are padded to their longest and take the least."""
    edges = np.concatenate([[0], np.flatnonzero(np.diff(lengths)) + 1, [len(lengths)]])
    least, begins = np.zeros(len(edges)), np.zeros(len(edges), np.int64)
    for end in range(1, len(edges)):
        costs = least[:end] + _CALL + (edges[end] - edges[:end]) * lengths[edges[end] - 1]
        begins[end] = costs.argmin()
        least[end] = costs.min()
    found: list[int] = []
    last = begins[-1]
    while last:
        found.insert(0, int(edges[last]))
        last = begins[last]
    return found
