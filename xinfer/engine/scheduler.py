"""Who computes what in the next step: continuous batching under a token budget and a number of sequences.

There is no prefill phase and no decode phase: each sequence has tokens, of which some are in the KV cache, and a step
computes the next ones. A decode step is the case where one is missing.
"""

__all__ = ["Schedule", "Scheduler"]

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from xinfer.engine.kv_cache import BlockPool
from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Batch, Limits, Sequence, State


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's plan: `counts[i]` new tokens of `sequences[i]`; the `sampled` ones get a token, in this order."""

    sequences: list[Sequence]
    counts: list[int]
    sampled: list[Sequence]
    batch: Batch
    preemptions: int


class Scheduler:
    """First come, first served. A sequence that finds no block takes those of the one that came last."""

    def __init__(self, limits: Limits, info: RunnerInfo) -> None:
        self.limits = limits
        self.pool = BlockPool(info.num_blocks, info.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._freed: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.enter(State.WAITING, perf_counter())
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is, and its blocks with it."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._freed += self.pool.release(sequence)
        sequence.enter(State.FINISHED, perf_counter())

    def take_freed(self) -> list[int]:
        """Return the blocks given back since the last call, less those that somebody holds again."""
        freed, self._freed = self._freed, []
        return self.pool.only_free(freed) if freed else freed

    def schedule(self) -> Schedule:
        """Choose the next step's tokens: first for those that run, oldest first, then for those that wait."""
        chosen: list[Sequence] = []
        counts: list[int] = []
        budget, preemptions = self.limits.max_num_batched_tokens, 0
        for sequence in list(self.running):
            if not budget or sequence.state is not State.RUNNING:
                continue
            count = min(len(sequence.token_ids) - sequence.num_computed, budget)
            while not self.pool.grow(sequence, sequence.num_computed + count):
                preemptions += 1
                if self._preempt_last() is sequence:
                    break
            else:
                chosen.append(sequence)
                counts.append(count)
                budget -= count
        while self.waiting and budget and not preemptions and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            count = min(len(sequence.token_ids), budget)
            if not self.pool.grow(sequence, count):
                break
            self.running.append(self.waiting.popleft())
            sequence.enter(State.RUNNING, perf_counter())
            chosen.append(sequence)
            counts.append(count)
            budget -= count
        assert chosen or not self.has_work, "a sequence was admitted that the cache can't hold"
        sampled = [s for s, n in zip(chosen, counts, strict=True) if s.num_computed + n == len(s.token_ids)]
        return Schedule(chosen, counts, sampled, make_batch(chosen, counts, self.pool.block_size), preemptions)

    def _preempt_last(self) -> Sequence:
        """Put the youngest running sequence back in front of the queue; its tokens will be computed again."""
        victim = self.running.pop()
        self._freed += self.pool.release(victim)
        victim.enter(State.PREEMPTED, perf_counter())
        self.waiting.appendleft(victim)
        return victim


def make_batch(sequences: list[Sequence], counts: list[int], block_size: int) -> Batch:
    """Lay the next `counts[i]` tokens of each sequence end to end; logits are wanted where a sequence is complete."""
    length = np.array(counts, np.int32)
    start = np.array([s.num_computed for s in sequences], np.int32)
    context = start + length
    ends = np.cumsum(length, dtype=np.int32)
    positions = np.arange(int(ends[-1]) if counts else 0, dtype=np.int32)
    positions += np.repeat(start - (ends - length), length)
    tables = np.full((len(sequences), max((len(s.blocks) for s in sequences), default=0)), -1, np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    owner = np.repeat(np.arange(len(sequences)), length)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    complete = context == np.array([len(s.token_ids) for s in sequences], np.int32)
    new = (s.token_ids[s.num_computed : s.num_computed + n] for s, n in zip(sequences, counts, strict=True))
    return Batch(
        token_ids=np.array([token for tokens in new for token in tokens], np.int32),
        positions=positions,
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=context,
        block_tables=tables,
        slot_mapping=slots,
        sample_at=(ends - 1)[complete],
        adapters=np.zeros(len(sequences), np.int32),
    )
