"""How much slower one set of timings is than another, with an interval that knows what belongs together.

Latencies of one repeat are alike: the machine was busy in it, or it was not. A test that takes each token for an
independent sample is sure of itself after a single repeat, so what is drawn again here are whole repeats (the cluster
bootstrap). Where two sides took turns, their repeats are drawn in pairs, and what disturbed both cancels out.
"""

__all__ = ["STATISTICS", "Ratio", "ratio"]

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

STATISTICS = ("mean", "p50", "p95")
RESAMPLES = 10_000
_CHUNK = 1 << 21  # numbers at a time


@dataclass(frozen=True, slots=True)
class Ratio:
    """A statistic of new samples over that of old ones: the estimate, and an interval around it.

    Attributes:
        low, high: None where there is a single repeat, of which nothing is known but itself.
        repeats: of the side that has fewer.
    """

    statistic: str
    new: float
    old: float
    estimate: float
    low: float | None
    high: float | None
    confidence: float
    repeats: int


def ratio(
    new: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]],
    statistic: str,
    *,
    paired: bool,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """Return the ratio of a statistic over all samples of all repeats, with its bootstrap interval.

    The interval is the percentile interval of the cluster bootstrap, its ends moved outwards as far as a t interval of
    so few repeats would be wider than a normal one with the plain variance (Hesterberg, "What teachers should know
    about the bootstrap", The American Statistician 69, 2015, section 4: the expanded percentile interval). Percentiles
    are linear, as everywhere.

    Args:
        new: for each repeat its samples, all above zero; repeats without any are left out by the caller.
        old: likewise.
        statistic: one of `STATISTICS`.
        paired: whether repeat i of both was measured in turns; they must then be equally many.
        confidence: of the interval.
        resamples: how often repeats are drawn.
        seed: of the draws.
    """
    assert statistic in STATISTICS
    assert min(len(new), len(old)) > 0
    assert not paired or len(new) == len(old)
    sides = _Side(new, statistic), _Side(old, statistic)
    here, before = (float(side(np.ones((1, side.repeats), np.int64))[0]) for side in sides)
    few = min(len(new), len(old))
    low = high = None
    if few > 1:
        rng, tail = np.random.default_rng(seed), _tail(few, confidence)
        drawn = [_draws(rng, side.repeats, resamples) for side in (sides[:1] if paired else sides)]
        ends = np.quantile(sides[0](drawn[0]) / sides[1](drawn[-1]), [tail, 1 - tail])
        low, high = float(ends[0]), float(ends[1])
    return Ratio(statistic, here, before, here / before, low, high, confidence, few)


def _draws(rng: np.random.Generator, repeats: int, resamples: int) -> Counts:
    """Return how often each repeat is drawn: [resamples, repeats], each row adding up to `repeats`."""
    return rng.multinomial(repeats, np.full(repeats, 1 / repeats), resamples)


def _tail(repeats: int, confidence: float) -> float:
    """Return the share of the bootstrap's ratios that lies beyond each end of the interval."""
    normal = NormalDist()
    t = _student(normal.inv_cdf((1 + confidence) / 2), repeats - 1)
    return normal.cdf(-t * math.sqrt(repeats / (repeats - 1)))


def _student(z: float, freedom: int) -> float:
    """Return the quantile of Student's t where the normal distribution has z (Abramowitz and Stegun, 26.7.5)."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


class _Side:
    """One side's samples, ready for its statistic to be computed of many draws of its repeats at once."""

    def __init__(self, blocks: Sequence[Sequence[float]], statistic: str) -> None:
        self.repeats, self._statistic = len(blocks), statistic
        # Sequences of one batch get their tokens in the same step: equal samples of a repeat are kept once, counted.
        parts = [np.unique(np.asarray(block, np.float64), return_counts=True) for block in blocks]
        values = np.concatenate([part for part, _ in parts])
        order = np.argsort(values, kind="stable")
        self._values: Floats = values[order]
        self._owners = np.repeat(np.arange(len(parts)), [len(part) for part, _ in parts])[order]
        self._counts = np.concatenate([counts for _, counts in parts])[order]
        self._sums = np.array([np.sum(block) for block in blocks], np.float64)
        self._lengths = np.array([len(block) for block in blocks], np.int64)

    def __call__(self, draws: Counts) -> Floats:
        """Return the statistic of each draw [R] of the repeats [R, repeats]."""
        totals = draws @ self._lengths
        if self._statistic == "mean":
            mean: Floats = (draws @ self._sums) / totals
            return mean
        rank = (totals - 1).astype(np.float64) * (int(self._statistic[1:]) / 100)
        rows = max(1, _CHUNK // len(self._values))
        pieces = [self._at(draws[i : i + rows], rank[i : i + rows]) for i in range(0, len(draws), rows)]
        return np.concatenate(pieces)

    def _at(self, draws: Counts, rank: Floats) -> Floats:
        """Return the values at these ranks, counted from zero, of all samples in their order."""
        ends = np.cumsum(draws[:, self._owners] * self._counts, axis=1)
        below = np.floor(rank)
        lower, upper = (
            self._values[(ends <= at[:, None]).sum(axis=1)] for at in (below, np.minimum(below + 1, ends[:, -1] - 1))
        )
        between: Floats = lower + (upper - lower) * (rank - below)
        return between
