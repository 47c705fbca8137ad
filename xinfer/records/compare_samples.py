"""How much slower one set of timings is than another, with an interval that knows what belongs together.

Latencies of one repeat are alike: the machine was busy in it, or it was not. A test that takes each token for an
independent sample is sure of itself after a single repeat, so here a repeat is one: its tokens make one number, such as
their 95th percentile, and what is drawn again for the interval are repeats (the cluster bootstrap). Where two sides
took turns, the repeats that were measured side by side make one ratio, in which what disturbed both cancels out. Of the
repeats the median counts, for one during which something else ran may take any time.
"""

__all__ = ["Ratio", "ratio"]

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 10_000
_LEAST = 1e-6  # milliseconds: of tokens that were guessed together, all but one take none


@dataclass(frozen=True, slots=True)
class Ratio:
    """A statistic of new samples over that of old ones: the estimate, and an interval around it.

    Attributes:
        new, old: the statistic of each side's repeats, the median over them.
        estimate: where repeats come in pairs, the median of their ratios; else `new / old`.
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
    """Return the ratio of a statistic, with its bootstrap interval.

    The interval is the percentile interval of the bootstrap, its ends moved outwards as far as a t interval of so few
    repeats would be wider than a normal one with the plain variance (Hesterberg, "What teachers should know about the
    bootstrap", The American Statistician 69, 2015: the expanded percentile interval). Percentiles are linear, as
    everywhere.

    Args:
        new: for each repeat its samples in milliseconds, at least one.
        old: likewise.
        statistic: `mean`, or a percentile such as `p95`.
        paired: whether repeat i of both was measured in turns; they must then be equally many.
        confidence: of the interval.
        resamples: how often repeats are drawn.
        seed: of the draws.
    """
    assert min(len(new), len(old)) > 0
    assert not paired or len(new) == len(old)
    here, before = (np.log([max(_value(one, statistic), _LEAST) for one in side]) for side in (new, old))
    rng, few = np.random.default_rng(seed), min(len(new), len(old))
    if paired:
        estimate, drawn = np.median(here - before), _medians(here - before, resamples, rng)
    else:
        estimate = np.median(here) - np.median(before)
        drawn = _medians(here, resamples, rng) - _medians(before, resamples, rng)
    low = high = None
    if few > 1:
        tail = _tail(few, confidence)
        low, high = (float(end) for end in np.exp(np.quantile(drawn, [tail, 1 - tail])))
    return Ratio(
        statistic=statistic,
        new=float(np.exp(np.median(here))),
        old=float(np.exp(np.median(before))),
        estimate=float(np.exp(estimate)),
        low=low,
        high=high,
        confidence=confidence,
        repeats=few,
    )


def _value(samples: Sequence[float], statistic: str) -> float:
    if statistic == "mean":
        return float(np.mean(samples))
    return float(np.percentile(samples, float(statistic.removeprefix("p")), method="linear"))


def _medians(values: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Return the medians of so many draws of these values with replacement."""
    drawn: Floats = np.median(values[rng.integers(0, len(values), (resamples, len(values)))], axis=1)
    return drawn


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
