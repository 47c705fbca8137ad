"""Chooses the next token of each sequence: the likeliest one, or one drawn by inverting the candidates' CDF.

A token is a function of (row of logits, parameters, seed, position) alone. The CDF runs over candidates by ascending
id: two backends whose logits differ in the last digits then differ in the ends of the intervals, never in their order.
"""

__all__ = ["effective", "pick", "sample"]

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from xinfer.engine.logits import Candidates, candidates
from xinfer.engine.random import uniform
from xinfer.engine.types import SamplingParams, Sequence


def sample(logits: Tensor, sequences: Rows[Sequence]) -> list[int | None]:
    """Return one token id for each sequence; None where its row holds NaN, +inf, or nothing finite.

    Args:
        logits: [K, V] float32, one row for each sequence, on any device.
        sequences: K of them; the token drawn is the one at position `len(token_ids)`.
    """
    largest, tokens = logits.max(1)  # NaN counts as the largest; of equals the first is taken
    usable = largest.isfinite()
    for key, rows in _groups(sequences, logits.shape[1]).items():
        harmless = logits[rows].where(usable[rows, None], 0.0)  # what is drawn from a refused row is thrown away
        tokens[rows] = _draw(harmless, [sequences[r] for r in rows], *key)
    return [t if ok else None for t, ok in zip(tokens.tolist(), usable.tolist(), strict=True)]


def _groups(sequences: Rows[Sequence], width: int) -> dict[tuple[bool, bool, bool], list[int]]:
    """Sort the rows that are not greedy by the filters they need (top-k, top-p, min-p)."""
    groups: dict[tuple[bool, bool, bool], list[int]] = {}
    for row, sequence in enumerate(sequences):
        p = sequence.request.params
        if not p.greedy:
            groups.setdefault((0 < p.top_k < width, p.top_p < 1, p.min_p > 0), []).append(row)
    return groups


def _draw(logits: Tensor, sequences: list[Sequence], use_k: bool, use_p: bool, use_min: bool) -> Tensor:
    params = [s.request.params for s in sequences]
    kept = candidates(
        logits,
        _column(logits, [p.temperature for p in params]),
        _column(logits, [p.top_k for p in params]).long() if use_k else None,
        _column(logits, [p.top_p for p in params]) if use_p else None,
        _column(logits, [p.min_p for p in params]) if use_min else None,
    )
    draws = uniform([s.request.seed for s in sequences], [len(s.token_ids) for s in sequences])
    return pick(kept, torch.from_numpy(draws).to(logits.device))


def pick(kept: Candidates, u: Tensor) -> Tensor:
    """Return for each row the first candidate at which the CDF exceeds u: ids [K] int64, from u [K] in [0, 1)."""
    cdf = kept.weights.cumsum(1)
    column = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)  # u < 1, so the product rounds below the sum
    return (column if kept.ids is None else kept.ids.gather(1, column))[:, 0]


def _column(like: Tensor, values: Rows[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def effective(params: SamplingParams) -> str:
    """Return in words what the parameters amount to, for logs and reports."""
    if params.greedy:
        return "greedy"
    parts = [f"temperature {params.temperature:g}"]
    parts += [f"top-k {params.top_k}"] if params.top_k > 0 else []
    parts += [f"top-p {params.top_p:g}"] if params.top_p < 1 else []
    parts += [f"min-p {params.min_p:g}"] if params.min_p > 0 else []
    return ", ".join(parts)
