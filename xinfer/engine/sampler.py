"""Chooses the next token of each sequence: the likeliest one, or one drawn by inverting the candidates' CDF.

A token is a function of (row of logits, parameters, seed, sample, position) alone. The CDF runs over candidates by
ascending id: two backends whose logits differ in the last digits then differ in the ends of the intervals, never in
their order.
"""

__all__ = ["Choice", "Drawn", "Sampler", "draw", "effective", "pick", "sample"]

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xinfer.engine.filters import Candidates, candidates
from xinfer.engine.logits import LogitsProcessor, adjust
from xinfer.engine.logprobs import describe, values_of
from xinfer.engine.random import uniform
from xinfer.engine.transfer import Awaited, send
from xinfer.engine.types import SamplingParams, Sequence, TokenLogprobs

_NOT_FINITE = "the model's logits are not finite (NaN or infinity) at this position"
_NONE_LEFT = "no token is left: allowed_token_ids, bad_words, min_tokens or a logits processor forbid all of them"


@dataclass(frozen=True, slots=True)
class Choice:
    """A sequence's next token, or in words why there is none."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Drawn:
    """The tokens that a step draws, perhaps still on their way from the device.

    Args:
        tokens: int64 [K], -1 where there is none.
        choose: makes choices of them.
    """

    def __init__(self, tokens: Tensor, choose: Callable[[list[int]], list[Choice]]) -> None:
        self.tokens, self._choose = tokens, choose
        self._awaited = Awaited(tokens)

    def wait(self) -> None:
        """Wait until they are there."""
        self._awaited.read()

    def read(self) -> list[Choice]:
        """Return one choice for each of the K sequences."""
        return self._choose(self._awaited.read().tolist())


class Sampler:
    """From logits to tokens: processors, penalties and masks, filters, draw, and the logprobs of what came.

    Args:
        processors: plugins' changes to logits, in this order.
        vocab_size: tokens that there are; a model's rows may be wider, padded with ids that mean nothing.
        logprobs_mode: one of `MODES`.
    """

    def __init__(
        self, processors: Rows[LogitsProcessor] = (), vocab_size: int | None = None, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        self.processors, self.vocab_size, self.logprobs_mode = processors, vocab_size, logprobs_mode

    def __call__(self, logits: Tensor, sequences: Rows[Sequence]) -> list[Choice]:
        """Choose one token for each of K sequences from logits [K, V] float32, on any device."""
        return self.draw(logits, sequences).read()

    def draw(self, logits: Tensor, sequences: Rows[Sequence]) -> Drawn:
        """As `__call__`, but nobody waits for the device here, if no request wants more than filters and a draw."""
        changed = logits
        for processor in self.processors:
            changed = processor.apply(changed, sequences)
        changed = adjust(changed, sequences)
        known = changed[:, : self.vocab_size]
        tokens = draw(known, sequences)
        if changed is not logits:  # what is no number stays none, even if a mask hides it
            tokens = tokens.where(logits.amax(1).isfinite(), -1)

        def choose(tokens: list[int]) -> list[Choice]:
            logprobs = self._logprobs(logits, known, sequences, tokens)
            return [
                Choice(token, logprobs.get(row)) if token >= 0 else Choice(-1, error=_why(logits[row]))
                for row, token in enumerate(tokens)
            ]

        return Drawn(tokens, choose)

    def score(self, logits: Tensor, sequence: Sequence, tokens: Rows[int]) -> list[TokenLogprobs]:
        """Return what the model's own rows [K, V] say of these K tokens of a prompt."""
        top = sequence.request.params.prompt_logprobs or 0
        return describe(values_of(logits, self.logprobs_mode), tokens, [top] * len(tokens))

    def _logprobs(
        self, raw: Tensor, changed: Tensor, sequences: Rows[Sequence], tokens: list[int]
    ) -> dict[int, TokenLogprobs]:
        """Return by row what was asked for."""
        tops = {row: s.request.params.logprobs for row, s in enumerate(sequences)}
        rows = [row for row, top in tops.items() if top is not None and tokens[row] >= 0]
        if not rows:
            return {}
        if self.logprobs_mode.startswith("processed"):
            values = _drawn_from(changed[rows], [sequences[row] for row in rows])
        else:
            values = raw[rows]
        told = describe(
            values_of(values, self.logprobs_mode), [tokens[row] for row in rows], [tops[row] or 0 for row in rows]
        )
        return dict(zip(rows, told, strict=True))


def _why(row: Tensor) -> str:
    largest = row.max()
    return _NONE_LEFT if largest.isfinite() else _NOT_FINITE


def sample(logits: Tensor, sequences: Rows[Sequence]) -> list[int | None]:
    """Return one token id for each sequence; None where `draw` has none."""
    return [None if token < 0 else token for token in draw(logits, sequences).tolist()]


def draw(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Return one token id for each sequence, int64 [K]; -1 where its row holds NaN, +inf, or nothing finite.

    Args:
        logits: [K, V] float32, one row for each sequence, on any device, which is not waited for.
        sequences: K of them; the token drawn is the one at position `len(token_ids)`.
    """
    tokens = _greedy(logits)
    for key, rows in _groups(sequences, logits.shape[1]).items():
        at = None if len(rows) == len(logits) else send(rows, logits.device)
        chosen, usable = (logits, tokens >= 0) if at is None else (logits[at], tokens[at] >= 0)
        if refused := chosen.device.type != "cpu" or not usable.all():  # a device is not asked
            chosen = chosen.where(usable[:, None], 0.0)
        drawn = _draw(chosen, [sequences[row] for row in rows], *key)
        drawn = drawn.where(usable, -1) if refused else drawn
        tokens = drawn if at is None else tokens.index_copy(0, at, drawn)
    return tokens


def _greedy(logits: Tensor) -> Tensor:
    """Return each row's likeliest token, -1 where its logit is not finite.

    NaN counts as the largest, and of equals the first. On a CPU by NumPy, which needs a fifth of torch's time: 118 and
    675 us for 32 rows of 49,152.
    """
    if logits.device.type == "cpu":
        rows = logits.numpy()
        found = rows.argmax(1)
        return torch.from_numpy(np.where(np.isfinite(rows[np.arange(len(rows)), found]), found, -1))
    largest, tokens = logits.max(1)
    return tokens.where(largest.isfinite(), -1)


def _groups(sequences: Rows[Sequence], width: int) -> dict[tuple[bool, bool, bool], list[int]]:
    """Sort the rows that are not greedy by the filters they need (top-k, top-p, min-p)."""
    groups: dict[tuple[bool, bool, bool], list[int]] = {}
    for row, sequence in enumerate(sequences):
        p = sequence.request.params
        if not p.greedy:
            groups.setdefault((0 < p.top_k < width, p.top_p < 1, p.min_p > 0), []).append(row)
    return groups


def _draw(logits: Tensor, sequences: list[Sequence], use_k: bool, use_p: bool, use_min: bool) -> Tensor:
    kept = _kept(logits, sequences, use_k, use_p, use_min)
    seeds, positions = [s.request.seed for s in sequences], [len(s.token_ids) for s in sequences]
    return pick(kept, send(uniform(seeds, positions, [s.sample for s in sequences]), logits.device))


def _kept(logits: Tensor, sequences: Rows[Sequence], use_k: bool, use_p: bool, use_min: bool) -> Candidates:
    params = [s.request.params for s in sequences]
    return candidates(
        logits,
        _column(logits, [p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]) if use_k else None,
        _column(logits, [p.top_p for p in params]) if use_p else None,
        _column(logits, [p.min_p for p in params]) if use_min else None,
    )


def _drawn_from(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Return logits [K, V] after temperature, what the filters drop as minus infinity; a greedy row as it is."""
    out = logits.clone()
    for key, rows in _groups(sequences, logits.shape[1]).items():
        kept = _kept(logits[rows], [sequences[row] for row in rows], *key)
        temperature = _column(logits, [sequences[row].request.params.temperature for row in rows])
        scaled = (logits[rows].double() / temperature[:, None]).float()
        dense = kept.weights if kept.ids is None else torch.zeros_like(scaled, dtype=torch.float64)
        if kept.ids is not None:
            dense.scatter_(1, kept.ids, kept.weights)
        out[rows] = scaled.masked_fill(dense == 0, -math.inf)
    return out


def pick(kept: Candidates, u: Tensor) -> Tensor:
    """Return for each row the first candidate at which the CDF exceeds u: ids [K] int64, from u [K] in [0, 1)."""
    cdf = kept.weights.cumsum(1)
    column = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)  # u < 1, so the product rounds below the sum
    return (column if kept.ids is None else kept.ids.gather(1, column))[:, 0]


def _column(like: Tensor, values: Rows[float]) -> Tensor:
    return send(np.array(values, np.float64), like.device)


def effective(params: SamplingParams) -> str:
    """Return in words what the parameters amount to, for logs and reports."""
    parts = ["greedy"] if params.greedy else [f"temperature {params.temperature:g}"]
    if not params.greedy:
        parts += [f"top-k {params.top_k}"] if params.top_k > 0 else []
        parts += [f"top-p {params.top_p:g}"] if params.top_p < 1 else []
        parts += [f"min-p {params.min_p:g}"] if params.min_p > 0 else []
    for name, neutral in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
        value = getattr(params, f"{name}_penalty")
        parts += [f"{name} penalty {value:g}"] if value != neutral else []
    return ", ".join(parts)
