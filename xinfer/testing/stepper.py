"""Drives a runner step by step, without engine or sampler, to look at its logits."""

__all__ = ["Stepper", "cut"]

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xinfer.engine.batch import make_batch
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch, Request, SamplingParams
from xinfer.engine.types import Sequence as Tokens


class Stepper:
    """Computes sequences on a runner whose blocks are handed out in a random order, or in the order of `blocks`."""

    def __init__(self, runner: ModelRunner, seed: int = 0, blocks: Sequence[int] | None = None) -> None:
        self.runner = runner
        order = np.random.default_rng(seed).permutation(runner.info.num_blocks).tolist() if blocks is None else blocks
        self._free = list(reversed(order))

    def start(self, prompt: Sequence[int]) -> Tokens:
        """Return a sequence that has its prompt and nothing computed."""
        request = Request("r", 0, tuple(prompt), SamplingParams(), 0)
        return Tokens(request, list(prompt), limit=1 << 20)

    def take(self, sequence: Tokens) -> None:
        """Give a sequence another block."""
        sequence.blocks.append(self._free.pop())

    def finish(self, sequence: Tokens) -> None:
        """Give a sequence's blocks to others."""
        self._free += sequence.blocks
        sequence.blocks = []

    def step(self, sequences: list[Tokens], counts: list[int]) -> list[Tensor]:
        """Compute the next tokens of these sequences in one batch; return the logits of each one's tokens."""
        logits = self.forward(self.batch(sequences, counts))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed += count
        return list(torch.split(logits, counts))

    def batch(self, sequences: list[Tokens], counts: list[int]) -> Batch:
        """Return the batch of these sequences' next tokens, with logits for all; blocks are handed out as needed."""
        size = self.runner.info.block_size
        for sequence, count in zip(sequences, counts, strict=True):
            while len(sequence.blocks) * size < sequence.num_computed + count:
                self.take(sequence)
        return make_batch(sequences, counts, counts, size)

    def forward(self, batch: Batch) -> Tensor:
        """Have the runner compute a batch."""
        return self.runner.forward(batch)

    def greedy(self, prompt: Sequence[int], chunks: Sequence[int], steps: int) -> tuple[list[int], Tensor]:
        """Prefill in these chunks, then decode; return the new tokens and the logits at every position."""
        sequence = self.start(prompt)
        rows = [self.step([sequence], [count])[0] for count in chunks]
        for _ in range(steps):
            sequence.token_ids.append(int(rows[-1][-1].argmax()))
            rows += self.step([sequence], [1])
        self.finish(sequence)
        return sequence.output_token_ids, torch.cat(rows)

    def in_company(self, prompts: Sequence[Sequence[int]], steps: int = 24) -> list[tuple[Tokens, Tensor]]:
        """Have sequences join at different times, be cut at random, and decode greedily between others' chunks.

        Returns each with the logits at all positions that it came to. The same for the same prompts.
        """
        rng = np.random.default_rng(2)
        sequences = [self.start(prompt) for prompt in prompts]
        rows: list[list[Tensor]] = [[] for _ in sequences]
        for _ in range(steps):
            chosen = [i for i in rng.permutation(len(sequences)) if rng.random() < 0.7]
            if not chosen:
                continue
            missing = [len(sequences[i].token_ids) - sequences[i].num_computed for i in chosen]
            counts = [int(rng.integers(1, most + 1)) for most in missing]
            for i, logits in zip(chosen, self.step([sequences[i] for i in chosen], counts), strict=True):
                rows[i].append(logits)
                if sequences[i].num_computed == len(sequences[i].token_ids):
                    sequences[i].token_ids.append(int(logits[-1].argmax()))
        return [(sequence, torch.cat(parts)) for sequence, parts in zip(sequences, rows, strict=True)]


def cut(length: int, rng: np.random.Generator) -> list[int]:
    """Cut a length into random pieces."""
    ends = np.flatnonzero(rng.random(length - 1) < 0.15) + 1
    return np.diff([0, *ends.tolist(), length]).tolist()  # type: ignore[no-any-return]
