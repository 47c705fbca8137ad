"""Figures of a request, under the names that they have everywhere: JSON, logs, reports."""

__all__ = ["GenerateStats", "percentile", "request_stats", "summarize"]

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class GenerateStats:
    """One sample's tokens and times (milliseconds; rates per second; null where there is nothing to divide).

    `queue_ms` is the time until it first ran, `prefill_ms` the time that it then took, while it was running, until its
    first token; `decode_ms` goes from the first token to the last, so `tpot_ms = decode_ms / (generated_tokens - 1)`:
    the first token comes from prefill. `cached_tokens` of the prompt were not computed for it: they were in the prefix
    cache, or another sample of the same request computed them.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    itl_ms: tuple[float, ...]
    e2e_ms: float
    seed: int
    sample: int = 0


def request_stats(
    prompt_tokens: int,
    cached_tokens: int,
    history: Sequence[tuple[str, float]],
    token_times: Sequence[float],
    seed: int,
    sample: int = 0,
) -> GenerateStats:
    """Compute a sample's figures from the times (seconds) at which its states began and its tokens were there."""
    generated = len(token_times)
    first, last = (token_times[0], token_times[-1]) if token_times else (None, None)
    arrived, ended = history[0][1], history[-1][1]
    started = next((when for state, when in history if state == "prefill"), None)
    prefill = _time_in("prefill", history, first) if first is not None else None
    decode = (last - first) * 1e3 if first is not None and last is not None and generated > 1 else None
    return GenerateStats(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=generated,
        queue_ms=(started - arrived) * 1e3 if started is not None else None,
        prefill_ms=prefill,
        decode_ms=decode,
        prefill_tok_s=_rate(prompt_tokens - cached_tokens, prefill),
        decode_tok_s=_rate(generated, decode),
        ttft_ms=(first - arrived) * 1e3 if first is not None else None,
        tpot_ms=decode / (generated - 1) if decode is not None else None,
        itl_ms=tuple((later - earlier) * 1e3 for earlier, later in pairwise(token_times)),
        e2e_ms=(ended - arrived) * 1e3,
        seed=seed,
        sample=sample,
    )


def _time_in(state: str, history: Sequence[tuple[str, float]], until: float) -> float:
    """Return the milliseconds spent in a state before a time."""
    stretches = ((begin, end) for (name, begin), (_, end) in pairwise([*history, ("", until)]) if name == state)
    return sum(max(0.0, min(end, until) - begin) for begin, end in stretches) * 1e3


def _rate(count: int, milliseconds: float | None) -> float | None:
    return count / (milliseconds / 1e3) if count and milliseconds else None


def percentile(samples: Iterable[float | None], q: float) -> float | None:
    """Return the q-th percentile by linear interpolation between ranks, or None where there are no samples."""
    present = [s for s in samples if s is not None]
    return float(np.percentile(present, q, method="linear")) if present else None


def summarize(stats: Sequence[GenerateStats], duration_s: float) -> dict[str, Any]:
    """Return the figures of a whole run: one request's own, or sums and percentiles over several.

    Sums are over requests, so `prefill_ms` of several requests that ran at once exceeds the time that passed;
    `output_tok_s` is what the run as a whole delivered in `duration_s`. Times are medians over requests (`itl_ms`: over
    the gaps between tokens), with their other percentiles, method and sample counts under `percentiles`.
    """
    samples: dict[str, list[float | None]] = {
        "queue_ms": [s.queue_ms for s in stats],
        "ttft_ms": [s.ttft_ms for s in stats],
        "tpot_ms": [s.tpot_ms for s in stats],
        "e2e_ms": [s.e2e_ms for s in stats],
        "itl_ms": [gap for s in stats for gap in s.itl_ms],
    }
    whole = [s for s in stats if s.sample == 0]  # the samples of a request share its prompt
    generated = sum(s.generated_tokens for s in stats)
    prefill, decode = _total([s.prefill_ms for s in whole]), _total([s.decode_ms for s in stats])
    return {
        "requests": len(whole),
        "duration_s": duration_s,
        "prompt_tokens": sum(s.prompt_tokens for s in whole),
        "cached_tokens": sum(s.cached_tokens for s in whole),
        "generated_tokens": generated,
        "prefill_ms": prefill,
        "decode_ms": decode,
        "prefill_tok_s": _rate(sum(s.prompt_tokens - s.cached_tokens for s in whole if s.prefill_ms), prefill),
        "decode_tok_s": _rate(sum(s.generated_tokens for s in stats if s.decode_ms), decode),
        "output_tok_s": generated / duration_s if duration_s else None,
        **{name: percentile(values, 50) for name, values in samples.items()},
        "percentiles": {"method": "linear"} | {name: _spread(values) for name, values in samples.items()},
    }


def _spread(samples: Sequence[float | None]) -> dict[str, float | None]:
    count = sum(sample is not None for sample in samples)
    return {"count": count} | {f"p{q}": percentile(samples, q) for q in (50, 95, 99)}


def _total(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) if present else None
