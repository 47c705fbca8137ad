"""A stepper that compares every row with what it should be, and says what differs so that one sees where to look."""

__all__ = ["Alone", "Checked", "explain", "off"]

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch
from xinfer.engine.types import Sequence as Tokens
from xinfer.testing.stepper import Stepper


class Alone:
    """Logits at all positions of a text, computed at once, with nobody else in the step and blocks in order."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._stepper = Stepper(runner, blocks=range(runner.info.num_blocks))
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        """Return them, [T, vocabulary]."""
        text = tuple(token_ids)
        if text not in self._known:
            sequence = self._stepper.start(text)
            self._known[text] = self._stepper.step([sequence], [len(text)])[0].cpu().clone()
            self._stepper.finish(sequence)
        return self._known[text]


def off(got: Tensor, expected: Tensor) -> Tensor:
    """Return how far each row is off, [K]: its largest difference; infinite where one of the two is no number."""
    differences = torch.where(got == expected, 0.0, (got - expected).abs().nan_to_num(torch.inf))
    return differences.amax(-1)


class Checked(Stepper):
    """A stepper whose every row is compared with that of the same text alone."""

    def __init__(
        self, runner: ModelRunner, alone: Alone, tolerance: float, seed: int = 0, blocks: Sequence[int] | None = None
    ) -> None:
        super().__init__(runner, seed, blocks)
        self.alone, self.tolerance = alone, tolerance
        self.last: Batch | None = None

    def text(self, length: int, seed: int = 0) -> list[int]:
        """Return random token ids, at most as many as a sequence may have."""
        info = self.runner.info
        rng = np.random.default_rng([length, seed])
        return rng.integers(0, info.vocab_size, min(length, info.max_model_len)).tolist()  # type: ignore[no-any-return]

    def forward(self, batch: Batch) -> Tensor:
        """Have the runner compute a batch; it must return a row of the vocabulary for each token asked for."""
        self.last = batch
        logits = self.runner.forward(batch)
        wanted = (len(batch.sample_at), self.runner.info.vocab_size)
        if tuple(logits.shape) != wanted or logits.dtype != torch.float32:
            pytest.fail(
                f"logits are {logits.dtype} {list(logits.shape)}, torch.float32 {list(wanted)} are expected\n"
                + _laid_out(batch),
                pytrace=False,
            )
        return logits

    def step(self, sequences: list[Tokens], counts: list[int]) -> list[Tensor]:
        """Compute the next tokens of these sequences, and compare each one's rows."""
        rows = super().step(sequences, counts)
        assert self.last is not None
        for index, (sequence, got) in enumerate(zip(sequences, rows, strict=True)):
            expected = self.alone(sequence.token_ids[: sequence.num_computed])[-len(got) :]
            self.compare(self.last, int(self.last.query_starts[index]), got, expected)
        return rows

    def compare(self, batch: Batch, place: int, got: Tensor, expected: Tensor) -> None:
        """Fail unless these rows, of the tokens from `place` on, are as they should be."""
        got = got.cpu()
        allowed = self.tolerance * expected.std(-1).nan_to_num(1.0).clamp(min=1.0)
        excess = off(got, expected) - allowed
        worst = int(excess.argmax())
        if not excess[worst] <= 0:
            text = explain(batch, place + worst, got[worst], expected[worst], float(allowed[worst]))
            pytest.fail(text, pytrace=False)


def explain(batch: Batch, place: int, got: Tensor, expected: Tensor, allowed: float) -> str:
    """Return what is wrong with the row of the token at this place of a batch."""
    owner = int(np.searchsorted(batch.query_starts, place, side="right")) - 1
    differences = torch.where(got == expected, 0.0, (got - expected).abs().nan_to_num(torch.inf))
    worst = int(differences.argmax())
    return (
        f"the logits of sequence {owner} at position {batch.positions[place]} (token id {batch.token_ids[place]}, "
        f"place {place} of the batch) are not those of its text alone\n"
        f"  largest difference  {differences[worst]:.3g} at id {worst}: {got[worst]:.6g} instead of "
        f"{expected[worst]:.6g}; {allowed:.2g} is allowed\n"
        f"  got       {_top(got)}\n"
        f"  expected  {_top(expected)}\n{_laid_out(batch)}"
    )


def _top(row: Tensor) -> str:
    values, ids = row.nan_to_num(torch.inf).topk(min(5, len(row)))
    return "  ".join(f"{i}: {row[i]:.4f}" for i in ids.tolist()) + f"  (of {len(row)})" * (len(values) < len(row))


def _laid_out(batch: Batch) -> str:
    """Return a batch as a table with a line for each sequence."""
    lines = [f"the batch, of {len(batch.token_ids)} new tokens:"]
    for index, table in enumerate(batch.block_tables):
        first, last = batch.query_starts[index], batch.query_starts[index + 1] - 1
        positions = f"positions {batch.positions[first]} to {batch.positions[last]} of {batch.context_lens[index]}"
        slots = _ranges(batch.slot_mapping[first : last + 1].tolist())
        lines.append(f"  sequence {index}: {positions}, slots {slots}, blocks {table[table >= 0].tolist()}")
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """Return 5-7, 12 for 5, 6, 7, 12."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges)
