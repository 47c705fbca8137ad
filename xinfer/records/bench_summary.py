"""The figures of a benchmark, from its samples."""

__all__ = ["spread", "summary", "tokens_per_second"]

from collections.abc import Iterable
from statistics import fmean, pstdev
from typing import Any

from xinfer.engine.stats import percentile
from xinfer.records.bench_samples import Measured, Repeat


def tokens_per_second(shape: str, repeat: Repeat) -> float | None:
    """Return a repeat's throughput over the requests that did not fail; None where none did not, or nothing took time.

    `ppN`: tokens of prompts over the time until the last first token. `tgN`: tokens after the first ones over the time
    that the slowest sequence took for its own; all start together. `ppN+tgM`: both kinds of tokens over the whole time.
    """
    done = repeat.completed
    if "+" in shape:
        tokens, milliseconds = sum(r.input_tokens + r.output_tokens for r in done), repeat.duration_ms
    elif shape.startswith("pp"):
        tokens, milliseconds = sum(r.input_tokens for r in done), max((r.ttft_ms or 0.0 for r in done), default=0.0)
    else:
        tokens, milliseconds = sum(len(r.itl_ms) for r in done), max((sum(r.itl_ms) for r in done), default=0.0)
    return tokens / milliseconds * 1e3 if tokens and milliseconds else None


def spread(samples: Iterable[float | None], name: str) -> dict[str, float | int | None]:
    """Return count, mean, standard deviation, extremes and percentiles (linear) by their usual names.

    As `mean_tpot_ms` for the name `tpot_ms`; without samples all but the count are None.
    """
    present = [sample for sample in samples if sample is not None]
    figures = {
        "count": len(present),
        "mean": fmean(present) if present else None,
        "median": percentile(present, 50),
        "std": pstdev(present) if present else None,
        "min": min(present, default=None),
        "max": max(present, default=None),
        **{f"p{q}": percentile(present, q) for q in (50, 95, 99)},
    }
    return {f"{kind}_{name}": value for kind, value in figures.items()}


def summary(measured: Measured) -> dict[str, Any]:
    """Return one line's figures, latencies over the requests that did not fail; `percentiles` names their method."""
    repeats = measured.repeats
    requests = [request for repeat in repeats for request in repeat.requests]
    done = [request for repeat in repeats for request in repeat.completed]
    seconds = sum(repeat.duration_ms for repeat in repeats) / 1e3
    tokens_in, tokens_out = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    energy = [repeat.energy_j for repeat in repeats]
    joules = sum(e for e in energy if e is not None) if energy and None not in energy else None
    return {
        "shape": measured.shape,
        "batch": measured.batch,
        "repeats": len(repeats),
        "completed": len(done),
        "failed": len(requests) - len(done),
        "errors": sorted({request.error for request in requests if request.error is not None}),
        "duration": seconds,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "cached_tokens": sum(repeat.cached_tokens for repeat in repeats),
        "request_throughput": len(done) / seconds if seconds else None,
        "output_throughput": tokens_out / seconds if seconds else None,
        "total_token_throughput": (tokens_in + tokens_out) / seconds if seconds else None,
        **spread((tokens_per_second(measured.shape, repeat) for repeat in repeats), "tok_s"),
        **spread((request.ttft_ms for request in done), "ttft_ms"),
        **spread((request.tpot_ms for request in done), "tpot_ms"),
        **spread((gap for request in done for gap in request.itl_ms), "itl_ms"),
        **spread((request.e2e_ms for request in done), "e2el_ms"),
        "percentiles": {"method": "linear"},
        "roofline": percentile((repeat.roofline for repeat in repeats), 50),
        "energy_j": joules,
        "energy_j_per_token": joules / (tokens_in + tokens_out) if joules is not None and tokens_out else None,
        "peak_memory_bytes": max((r.peak_memory_bytes for r in repeats if r.peak_memory_bytes), default=None),
    }
