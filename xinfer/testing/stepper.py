"""Drives a runner step by step, without engine or sampler, to look at its logits."""

__all__ = ["Stepper", "cut"]

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xinfer.engine.batch import make_batch
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Request, SamplingParams
from xinfer.engine.types import Sequence as Tokens


class Stepper:
    """Computes sequences on a runner whose blocks are handed out in a random order."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = np.random.default_rng(seed).permutation(runner.info.num_blocks).tolist()

    def start(self, prompt: Sequence[int]) -> Tokens:
        """Return a sequence that has its prompt and nothing computed."""
        request = Request("r", 0, tuple(prompt), SamplingParams(), 0)
        return Tokens(request, list(prompt), limit=1 << 20)

    def finish(self, sequence: Tokens) -> None:
        """Give a sequence's blocks to others."""
        self._free += sequence.blocks
        sequence.blocks = []

    def step(self, sequences: list[Tokens], counts: list[int]) -> list[Tensor]:
        """Compute the next tokens of these sequences in one batch; return the logits of each one's tokens."""
        size = self.runner.info.block_size
        for sequence, count in zip(sequences, counts, strict=True):
            while len(sequence.blocks) * size < sequence.num_computed + count:
                sequence.blocks.append(self._free.pop())
        logits = self.runner.forward(make_batch(sequences, counts, counts, size))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed += count
        return list(torch.split(logits, counts))

    def greedy(self, prompt: Sequence[int], chunks: Sequence[int], steps: int) -> tuple[list[int], Tensor]:
        """Prefill in these chunks, then decode; return the new tokens and the logits at every position."""
        sequence = self.start(prompt)
        rows = [self.step([sequence], [count])[0] for count in chunks]
        for _ in range(steps):
            sequence.token_ids.append(int(rows[-1][-1].argmax()))
            rows += self.step([sequence], [1])
        self.finish(sequence)
        return sequence.output_token_ids, torch.cat(rows)


def cut(length: int, rng: np.random.Generator) -> list[int]:
    """Cut a length into random pieces."""
    ends = np.flatnonzero(rng.random(length - 1) < 0.15) + 1
    return np.diff([0, *ends.tolist(), length]).tolist()  # type: ignore[no-any-return]
