"""What held a run back, and which setting to change: rules over a record's figures."""

__all__ = ["Finding", "diagnose"]

from collections.abc import Callable

from xinfer.errors import UsageError
from xinfer.records.evidence import Evidence, Finding
from xinfer.records.pace import cache_misses, decode_outliers, host_bound, interference, long_prefill, small_batch
from xinfer.records.reader import RecordedRun
from xinfer.records.waiting import cache_full, out_of_memory, preemption, queueing

# Steps without which nothing is said: the fewest of which a 95th percentile is not just the largest.
_ENOUGH = 20

# In the order in which to see to them: memory, the first token, the others, throughput.
_RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    preemption,
    cache_full,
    queueing,
    long_prefill,
    cache_misses,
    interference,
    decode_outliers,
    host_bound,
    small_batch,
)
# What follows from a cause is not said beside it: who is put aside waits, is computed again, and delays others. Of two
# that may each be the other's cause, such as too few places and too little memory, the one that cost more is said.
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "preemption": ("cache_full", "queueing", "long_prefill", "cache_misses", "interference"),
    "cache_full": ("queueing", "long_prefill", "cache_misses", "interference"),
    "cache_misses": ("long_prefill", "interference"),
    "queueing": ("preemption", "cache_full", "small_batch"),
}


def diagnose(run: RecordedRun) -> list[Finding]:
    """Return what held a run back, the first thing to see to first; nothing of a healthy one.

    A record that says too little is a `UsageError`.
    """
    evidence = Evidence(run)
    if (failure := out_of_memory(evidence)) is not None:
        return [failure]  # the rest of it is not what anybody wanted to measure
    _check(evidence)
    found = [finding for rule in _RULES if (finding := rule(evidence)) is not None]
    return [finding for finding in found if not any(_explains(cause, finding) for cause in found)]


def _explains(cause: Finding, other: Finding) -> bool:
    if other.name not in _EXPLAINS.get(cause.name, ()):
        return False
    return cause.name not in _EXPLAINS.get(other.name, ()) or cause.share >= other.share


def _check(e: Evidence) -> None:
    """Refuse a record that says too little."""
    folder, count = e.run.folder, len(e.steps)
    if (e.config.get("record") or {}).get("steps") == "off":
        raise UsageError(f"{folder} has no steps, for it was recorded with record.steps=off: run it again without that")
    if not e.steps:
        raise UsageError(f"{folder} has no steps: the run computed nothing (status {e.run.status})")
    if count < _ENOUGH:
        raise UsageError(
            f"{folder} has {count} step{'s' * (count != 1)}, too few to say anything: at least {_ENOUGH} are needed, "
            f"as for a request of {_ENOUGH} tokens (--max-tokens)"
        )
