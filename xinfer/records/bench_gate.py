"""Whether something got slower: what is compared, what can't be, and when the evidence is enough to say so."""

__all__ = ["Comparison", "Gate", "compare", "differences", "judge", "memory_growth"]

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xinfer.records.bench_samples import Measured, Repeat, Side
from xinfer.records.compare_samples import Ratio, ratio

FEWEST = 5  # repeats, of which the interval is as sure as it says
GROWTH = 0.10  # of memory, from which on a reason is asked for
_MEMORY = ("peak_memory_bytes", "resident_weight_bytes")
_STATISTICS = ("mean", "p50", "p95")
# What fails. The mean is told beside it: one stall of the machine moves it, so that it proves nothing.
_FAILS = {"ttft": ("p50",), "itl": ("p50", "p95")}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One statistic of one line of both sides.

    Attributes:
        latency: `ttft` (of work without decoding) or `itl` (tokens after the first).
        ratio: new over old, times: above one is slower.
        verdict: `regression`, `inconclusive`, `pass`; `told` for one that never fails.
    """

    name: str
    latency: str
    ratio: Ratio
    verdict: str


@dataclass(frozen=True, slots=True)
class Gate:
    """What the comparison came to.

    Attributes:
        missing: lines of which there is nothing to compare, for on one side all requests failed.
        grown: by name, new and old bytes of what takes more than a tenth more memory than before.
        reason: that was given for it.
    """

    comparisons: tuple[Comparison, ...]
    missing: tuple[str, ...]
    grown: Mapping[str, tuple[int, int]]
    reason: str | None

    @property
    def verdict(self) -> str:
        """The worst of all: `regression`, `memory`, `inconclusive` or `pass`."""
        verdicts = {comparison.verdict for comparison in self.comparisons}
        if "regression" in verdicts:
            return "regression"
        if self.grown and not self.reason:
            return "memory"
        return "inconclusive" if "inconclusive" in verdicts or self.missing else "pass"

    @property
    def failed(self) -> bool:
        """Whether the evidence is enough."""
        return self.verdict in ("regression", "memory")


def differences(new: Mapping[str, Any], old: Mapping[str, Any], ignore: Collection[str] = ()) -> list[str]:
    """Return in words each fact that differs, but for those of the parts to be ignored (`versions`)."""
    names = [name for name in sorted({*new, *old}) if name.partition(".")[0] not in ignore]
    return [f"{name} is {new.get(name)!r}, was {old.get(name)!r}" for name in names if new.get(name) != old.get(name)]


def compare(new: Measured, old: Measured, *, paired: bool) -> list[Ratio]:
    """Return mean, p50 and p95 of the latency that counts for this work, new over old; nothing where all failed."""
    latency = _latency(new.shape)
    here, before = _samples(new.repeats, latency), _samples(old.repeats, latency)
    if paired:
        kept = [(a, b) for a, b in zip(here, before, strict=True) if a and b]
        here, before = [a for a, _ in kept], [b for _, b in kept]
    else:
        here, before = [block for block in here if block], [block for block in before if block]
    if not here or not before:
        return []
    return [ratio(here, before, statistic, paired=paired) for statistic in _STATISTICS]


def _latency(shape: str) -> str:
    return "itl" if "tg" in shape else "ttft"


def _samples(repeats: Sequence[Repeat], latency: str) -> list[list[float]]:
    if latency == "ttft":  # of a batch, the last: by then all prompts are computed
        return [[max(r.ttft_ms or 0.0 for r in repeat.completed)] if repeat.completed else [] for repeat in repeats]
    return [[gap for request in repeat.completed for gap in request.itl_ms] for repeat in repeats]


def judge(
    new: Side,
    old: Side,
    *,
    paired: bool,
    max_regression: float | None,
    floor_ms: float = 0.0,
    reason: str | None = None,
) -> Gate:
    """Compare all that both sides measured; without `max_regression` nothing fails, and it is only told.

    A statistic fails as a `regression` only if its whole interval lies above 1 + `max_regression`, and if it is worse
    by `floor_ms` at least. If the estimate lies there and the interval does not, or there are too few repeats, it is
    `inconclusive`.
    """
    before = {(m.shape, m.batch): m for m in old.measured}
    comparisons: list[Comparison] = []
    missing: list[str] = []
    for measured in new.measured:
        latency = _latency(measured.shape)
        ratios = compare(measured, before[measured.shape, measured.batch], paired=paired)
        missing += [] if ratios else [measured.name]
        for found in ratios:
            told = max_regression is None or found.statistic not in _FAILS[latency]
            verdict = "told" if told else _verdict(found, 1 + (max_regression or 0.0), floor_ms)
            comparisons.append(Comparison(measured.name, latency, found, verdict))
    grown = {} if max_regression is None else memory_growth(new, old)
    return Gate(tuple(comparisons), tuple(missing), grown, reason)


def _verdict(found: Ratio, limit: float, floor_ms: float) -> str:
    if found.repeats < FEWEST:
        return "inconclusive"
    if found.estimate <= limit or found.new - found.old < floor_ms:
        return "pass"
    return "regression" if (found.low or 0.0) > limit else "inconclusive"


def memory_growth(new: Side, old: Side) -> dict[str, tuple[int, int]]:
    """Return by name, new and old, what takes more than a tenth more bytes; what either side does not know is left out.

    The KV cache is none of it: its size follows from what memory is free.
    """
    found = {name: (_bytes(new, name), _bytes(old, name)) for name in _MEMORY}
    return {name: (n, o) for name, (n, o) in found.items() if n and o and n > o * (1 + GROWTH)}


def _bytes(side: Side, name: str) -> int:
    peaks = [repeat.peak_memory_bytes or 0 for m in side.measured for repeat in m.repeats]
    return max(peaks, default=0) if name == "peak_memory_bytes" else int(side.resources.get(name) or 0)
