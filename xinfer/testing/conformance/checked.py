"""A stepper that compares every row with what it should be, and says what differs so that one sees where to look."""

__all__ = ["Alone", "Checked", "Tolerance", "explain"]

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a row of logits may be off.

    Attributes:
        share: of the row's standard deviation, or of 1 where that is less.
        each: whether every logit has to be as near; else the root mean square of a row's differences, as suits what is
            rounded.
    """

    share: float
    each: bool = True

    def used(self, got: Tensor, expected: Tensor) -> Tensor:
        """Return how much of it each row takes, [K]; above 1 is too much."""
        differences = _differences(got, expected)
        off = differences.amax(-1) if self.each else differences.square().mean(-1).sqrt()
        return off / (self.share * expected.std(-1).nan_to_num(1.0).clamp(min=1.0))


def _differences(got: Tensor, expected: Tensor) -> Tensor:
    """Return absolute differences; infinite where one of the two is no number."""
    return torch.where(got == expected, 0.0, (got - expected).abs().nan_to_num(torch.inf))


class Checked(Stepper):
    """A stepper whose every row is compared with that of the same text alone.

    Attributes:
        strict: whether a row that is too far off fails at once.
        used: how much of the tolerance each row took.
        last: the last batch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        alone: Alone,
        tolerance: Tolerance,
        blocks: Sequence[int] | None = None,
        *,
        strict: bool = True,
    ) -> None:
        super().__init__(runner, blocks=blocks)
        if runner.info.kv_tokens < runner.info.num_blocks * runner.info.block_size:
            runner.free(range(runner.info.num_blocks))  # what others have left takes memory that is to be had
        self.alone, self.tolerance, self.strict = alone, tolerance, strict
        self.used: list[float] = []
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
        used = self.tolerance.used(got, expected)
        self.used += used.tolist()
        worst = int(used.argmax())
        if self.strict and not used[worst] <= 1:
            text = explain(batch, place + worst, got[worst], expected[worst], float(used[worst]))
            pytest.fail(text, pytrace=False)


def explain(batch: Batch, place: int, got: Tensor, expected: Tensor, used: float) -> str:
    """Return what is wrong with the row of the token at this place of a batch, so many times as far off as allowed."""
    owner = int(np.searchsorted(batch.query_starts, place, side="right")) - 1
    differences = _differences(got, expected)
    worst = int(differences.argmax())
    return (
        f"the logits of sequence {owner} at position {batch.positions[place]} (token id {batch.token_ids[place]}, "
        f"place {place} of the batch) are not those of its text alone\n"
        f"  largest difference  {differences[worst]:.3g} at id {worst}: {got[worst]:.6g} instead of "
        f"{expected[worst]:.6g}; the row is off by {used:,.3g} times what is allowed\n"
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
