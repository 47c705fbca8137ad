"""The graph as a `ModelRunner` on the CPU: one row of the cache for each sequence."""

__all__ = ["OnnxRunner", "cuts"]

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx.build import build, opened
from xinfer.backends.onnx.calls import Calls
from xinfer.backends.onnx.probe import probe
from xinfer.backends.onnx.providers import CPU, Providers
from xinfer.backends.onnx.threads import OneThread
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch, Limits
from xinfer.process_memory import ResidentMemory

log = logging.getLogger(__name__)

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
        self._context, self._providers = context, providers or [(CPU, {})]
        built = build(context, self._providers)
        self._rows, self._form, self.info = built.rows, built.form, built.info
        self._ragged, self._joins = built.form.ragged, True
        self._calls = Calls(built.session, self._rows)
        self._telling: Calls | None = None  # of the graph that tells of its layers, once somebody asks
        self._one_thread = OneThread()
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
            self._calls.call(batch, group, logits)
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

    def layers(self, batch: Batch) -> list[Tensor]:
        """See `ModelRunner.layers`."""
        self._one_thread.take()
        if self._telling is None:
            session, _ = opened(self._context, replace(self._form, layers=True), self._providers)
            self._telling = Calls(session, self._rows)
        logits = torch.empty(len(batch.sample_at), self.info.vocab_size)
        told = [torch.empty(len(batch.token_ids), width) for width in self._telling.widths]
        for group in self._groups(batch):
            self._telling.call(batch, group, logits, told)
        return told

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
        del self._calls, self._telling
        self._rows.close()


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
