"""Decode steps that are recorded once, and then only replayed: on a CUDA device as CUDA graphs.

A graph replays the very kernels that were recorded, on the same memory. So there is one for each of some numbers of
sequences, `sizes`; a step of fewer is filled up with sequences that own a block that nobody else has, and what a step
brings is first copied to where the kernels read it. As vLLM does it (`CUDAGraph` modes of its v1 engine).
"""

__all__ = ["CudaRecorder", "Recorder", "Recordings", "sizes"]

import logging
from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xinfer.backends.torch.lent import lent
from xinfer.backends.torch.paged import Kernels, PagedStep, host_numbers

log = logging.getLogger(__name__)

Compute = Callable[[Tensor, Tensor, PagedStep], Tensor]  # token ids and positions [T], a step: logits
Replay = Callable[[], Tensor]
Recorder = Callable[[Replay], Replay]  # computes on memory that stays where it is; what does so again

_FEW, _GRAIN = (1, 2, 4), 8


def sizes(most: int) -> list[int]:
    """Return for how many sequences steps are recorded: 1, 2, 4, multiples of 8, and `most`."""
    return [*(size for size in _FEW if size < most), *range(_GRAIN, most, _GRAIN), most]


class CudaRecorder:
    """Records CUDA graphs, which share the memory that they compute in: only one at a time is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __call__(self, compute: Replay) -> Replay:
        """Return what replays the kernels that `compute` starts; the next replay of any overwrites what it returns."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # what is loaded or tuned when it first runs can't be recorded
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            out = lent(compute())
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class Recordings:
    """Recorded decode steps of up to `most` sequences.

    Args:
        compute: what is recorded.
        most: sequences of a step.
        longest: tokens of a sequence at most.
        scratch: the block that sequences own that fill up a step.
        block_size: tokens of a block.
        kernels: what computes each kind of attention.
        device: where all of it lies.
        record: records a step.
    """

    def __init__(
        self,
        compute: Compute,
        most: int,
        longest: int,
        scratch: int,
        block_size: int,
        kernels: Kernels,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._compute, self._longest, self._kernels = compute, longest, kernels
        self._scratch, self._block_size = scratch, block_size
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int32, device=device)
        self._slots = torch.full((most,), scratch * block_size, device=device)
        self._contexts = torch.ones(most, dtype=torch.int32, device=device)
        self._tables = torch.full((most, -(-longest // block_size)), scratch, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._held = 0  # sequences of the last step; all beyond are filled up
        self._sizes, self._replays = sizes(most), dict[int, Replay]()
        started = perf_counter()
        log.warning("decode steps of %s sequences are recorded", ", ".join(map(str, self._sizes)))
        for size in reversed(self._sizes):  # so that the first one's memory is enough for all
            self._replays[size] = record(self._recorded(size))
        log.warning("recording %d decode steps took %.1f s", len(self._sizes), perf_counter() - started)

    def _recorded(self, size: int) -> Replay:
        """Return what computes the logits of `size` sequences, which is what is recorded."""
        step = PagedStep(
            slots=self._slots[:size],
            sample_at=None,
            longest=self._longest,
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[:size],
            block_size=self._block_size,
            host=host_numbers(np.arange(size + 1, dtype=np.int32), np.full(size, self._longest, np.int32)),
            single=True,
            kernels=self._kernels,
        )
        ids, positions = self._ids[:size], self._positions[:size]
        return lambda: self._compute(ids, positions, step)

    def __call__(self, token_ids: Tensor, positions: Tensor, step: PagedStep) -> Tensor | None:
        """Return float32 logits [K, vocabulary] of the tokens `step.sample_at`; None for a step that is no decode."""
        count = len(token_ids)
        if count != len(step.context_lens) or count > self._sizes[-1]:
            return None
        self._take(token_ids, positions, step)
        size = self._sizes[bisect_left(self._sizes, count)]
        logits = self._replays[size]()
        return logits[:count].clone() if step.sample_at is None else logits.index_select(0, step.sample_at)

    def _take(self, token_ids: Tensor, positions: Tensor, step: PagedStep) -> None:
        """Copy what a step brings to where it is read; what the last one had beyond that becomes filling again."""
        count, width = step.block_tables.shape
        self._ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        self._slots[:count].copy_(step.slots)
        self._contexts[:count].copy_(step.context_lens)
        self._tables[:count, :width].copy_(step.block_tables)
        if count < self._held:
            self._slots[count : self._held].fill_(self._scratch * self._block_size)
            self._contexts[count : self._held].fill_(1)
            self._tables[count : self._held].fill_(self._scratch)
        self._held = count
