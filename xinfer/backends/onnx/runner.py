"""The graph as a `ModelRunner` on the CPU: one row of the cache for each sequence."""

__all__ = ["OnnxRunner"]

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx.build import build
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch

_BINDINGS = 64  # that are kept; one is 4 names a layer


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that one call of the session computes, with so many new tokens each at most."""

    sequences: NDArray[np.int64]
    tokens: int


class OnnxRunner(ModelRunner):
    """Runs a graph step by step, each kind of sequences by a call of its own.

    Sequences with one new token are computed together. Of others the operator takes several in a call only where they
    are at their beginning, padded to the longest (`query_seqlens`, of later versions, takes any).
    """

    def __init__(self, context: BackendContext) -> None:
        self._process = psutil.Process()
        built = build(context)
        self._session, self._rows, self.info = built.session, built.rows, built.info
        self._ragged, self._joins = built.form.ragged, not context.limits.invariant
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._bindings: OrderedDict[tuple[int, int], ort.IOBinding] = OrderedDict()

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        logits = torch.empty(len(batch.sample_at), self.info.vocab_size)
        owner = np.searchsorted(batch.query_starts, batch.sample_at, side="right") - 1
        for group in self._groups(batch):
            wanted = np.flatnonzero(np.isin(owner, group.sequences)) if len(owner) else owner
            beside = len(wanted) == 0 or wanted[-1] - wanted[0] == len(wanted) - 1
            out = (
                logits[wanted[0] : wanted[-1] + 1]
                if beside and len(wanted)
                else torch.empty(len(wanted), logits.shape[1])
            )
            self._run(batch, group, owner, wanted, out)
            if not beside:
                logits[torch.from_numpy(wanted)] = out
        return logits

    def _groups(self, batch: Batch) -> Iterator[Group]:
        """Yield what is computed together."""
        lengths = np.diff(batch.query_starts)
        single, others = np.flatnonzero(lengths == 1), np.flatnonzero(lengths != 1)
        if len(single):
            yield Group(single, 1)
        fresh = (batch.context_lens == lengths) | self._ragged
        together: list[int] = []
        tokens = 0
        for s in others[np.argsort(lengths[others], kind="stable")[::-1]].tolist():
            longest = int(lengths[together[0]]) if together else 0
            joins = (
                self._joins and fresh[s] and together and (len(together) + 1) * longest <= 1.25 * (tokens + lengths[s])
            )
            if together and not joins:
                yield Group(np.array(together), longest)
                together, tokens = [], 0
            together.append(s)
            tokens += int(lengths[s])
            if not fresh[s]:
                yield Group(np.array(together), int(lengths[s]))
                together, tokens = [], 0
        if together:
            yield Group(np.array(together), int(lengths[together[0]]))

    def _run(
        self, batch: Batch, group: Group, owner: NDArray[np.int64], wanted: NDArray[np.int64], out: Tensor
    ) -> None:
        """Compute a group's tokens, and the logits `wanted` of the step's into `out`."""
        chosen, tokens = group.sequences, group.tokens
        blocks = batch.block_tables[chosen, 0]
        first = self._rows.gather(blocks)
        order = np.argsort(self._rows.row_of[blocks])
        chosen = chosen[order]
        starts, contexts = batch.query_starts[chosen], batch.context_lens[chosen]
        lengths = batch.query_starts[chosen + 1] - starts
        at = starts[:, None] + np.minimum(np.arange(tokens, dtype=np.int32), lengths[:, None] - 1)
        place = np.empty(len(batch.context_lens), np.int64)
        place[chosen] = np.arange(len(chosen))
        sampled = batch.sample_at[wanted]
        inside = place[owner[wanted]] * tokens + sampled - batch.query_starts[owner[wanted]]
        feeds = {
            "input_ids": batch.token_ids[at],
            "last": contexts - 1,
            "longest": contexts.max(keepdims=True),
            "sample_at": inside.astype(np.int32),
            "position_ids": batch.positions[at].astype(np.int64),
            "lengths": lengths,
        }
        binding = self._binding(first, len(chosen))
        for name in self._inputs & feeds.keys():
            binding.bind_cpu_input(name, feeds[name])
        binding.bind_output("logits", "cpu", 0, np.float32, tuple(out.shape), out.data_ptr())
        self._session.run_with_iobinding(binding)
        self._rows.filled[blocks] = np.maximum(self._rows.filled[blocks], batch.context_lens[group.sequences])

    def _binding(self, first: int, count: int) -> ort.IOBinding:
        """Return a binding of so many rows of the cache; those used last are kept."""
        binding = self._bindings.get((first, count))
        if binding is not None:
            self._bindings.move_to_end((first, count))
            return binding
        binding = self._bindings[first, count] = self._session.io_binding()
        for index, tensor in enumerate(self._rows.tensors):
            layer, part = index // 2, ("key", "value")[index % 2]
            rows = tensor[first : first + count]
            place = ("cpu", 0, self._rows.numpy_dtype, tuple(rows.shape), rows.data_ptr())
            binding.bind_input(f"past_key_values.{layer}.{part}", *place)
            binding.bind_output(f"present.{layer}.{part}", *place)
        if len(self._bindings) > _BINDINGS:
            self._bindings.popitem(last=False)
        return binding

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        self._rows.copy(source, target, tokens)

    def free(self, blocks: Sequence[int]) -> None:
        """See `ModelRunner.free`."""
        self._rows.free(blocks)

    def metrics(self) -> Mapping[str, Any]:
        """See `ModelRunner.metrics`."""
        return {"mem_used": self._process.memory_info().rss}

    def close(self) -> None:
        """Give back the memory."""
        self._bindings.clear()
        del self._session
        self._rows.close()
