"""What kept requests from running: memory, or too few places."""

__all__ = ["cache_full", "out_of_memory", "preemption", "queueing"]

import re

from xinfer.engine.stats import percentile
from xinfer.hardware import gibibytes
from xinfer.records.evidence import Evidence, Finding

# Of a number of sequences no more than four times what the run had is advised: further than that it says nothing.
_STRIDE = 4
_SPARE = 0.2  # of a device's memory is left to the steps and to others when more is advised for the cache
_OUT_OF_MEMORY = re.compile(r"out.?of.?memory|MemoryError|can(no|')t allocate memory|not enough memory", re.IGNORECASE)


def out_of_memory(e: Evidence) -> Finding | None:
    """The run failed for want of memory."""
    error = str(e.run.info.get("error") or "")
    if e.run.status != "failed" or not _OUT_OF_MEMORY.search(error):
        return None
    cache, error = int(e.runner.get("kv_cache_bytes") or 0), error[:120].rstrip(": ")
    if not cache or not e.steps:
        text = f"The run ran out of memory before its first step ({error}). A lower engine.max_model_len may help too."
        return Finding("out_of_memory", 1.0, text, "model.dtype=bfloat16")
    used, last = max(s["kv_blocks_used"] for s in e.steps) / (e.blocks or 1), e.steps[-1]
    tokens = last["prefill_tokens"] + last["decode_tokens"]
    text = (
        f"The run ran out of memory after {len(e.steps)} steps, the last of them with {tokens} tokens in "
        f"{last['batch_size']} sequences ({error}). Of the KV cache's {gibibytes(cache)} no more than {used:.0%} "
        "was in use: a smaller one leaves more to the steps. So do smaller steps (engine.max_num_batched_tokens, "
        "engine.max_num_seqs), a lower engine.max_model_len, and model.dtype=bfloat16."
    )
    numbers = {"steps": len(e.steps), "tokens": tokens, "kv_cache_bytes": cache, "cache_used": used}
    return Finding("out_of_memory", 1.0, text, f"engine.kv_memory={cache // 2}", numbers)


def preemption(e: Evidence) -> Finding | None:
    """Sequences were put aside for want of blocks."""
    count = sum(s["preemptions"] for s in e.steps if e.short_of_memory(s))
    share = max(e.put_aside, e.waiting["memory"] / e.total)
    if not count or share < e.WORTH:
        return None
    # Fewer places than sequences ran at a time would lower throughput more than not computing again raises it.
    sustained = round(percentile((s["batch_size"] for s in e.steps), 50) or 1)
    fewer = f"engine.max_num_seqs={sustained}"
    setting, others = _more_memory(e)
    if setting is not None:
        others.append(f"{fewer} spares the computing again, not the waiting")
    text = (
        f"{_fullness(e)} {count} times one was put aside for want of blocks, to be computed again later, which cost "
        f"{share:.0%} of the requests' time.{_otherwise(others)}"
    )
    return Finding("preemption", share, text, setting or fewer, {"preemptions": count, **_numbers(e)})


def cache_full(e: Evidence) -> Finding | None:
    """Requests waited for blocks, though nobody was put aside."""
    share = e.waiting["memory"] / e.total
    if share < e.WORTH:
        return None
    setting, others = _more_memory(e)
    text = f"{_fullness(e)} Waiting for blocks was {share:.0%} of the requests' time.{_otherwise(others)}"
    return Finding("cache_full", share, text, setting, _numbers(e))


def queueing(e: Evidence) -> Finding | None:
    """Requests waited for a place."""
    share = e.waiting["seats"] / e.total
    seats = min(e.at_once, _STRIDE * e.seats)
    if share < e.WORTH or seats <= e.seats:
        return None
    memory, others = _more_memory(e, seats) if seats > e.fits else ("", [])
    seats = min(seats, e.fits) if memory is None else seats
    settings = [f"engine.max_num_seqs={seats}"] * (seats > e.seats) + [memory] * bool(memory)
    others.append("engine.policy=priority lets urgent requests go first")
    free = percentile((s["kv_blocks_free"] / (e.blocks or 1) for s in e.steps if s["batch_size"] >= e.seats), 50) or 0.0
    text = (
        f"Requests waited for one of the engine.max_num_seqs={e.seats} places, {share:.0%} of their time, while "
        f"{free:.0%} of the KV cache was free; it holds {e.fits} sequences of {e.longest:,} tokens, and up to "
        f"{e.at_once} wanted to run at once.{_otherwise(others)}"
    )
    numbers = {"seats": e.seats, "fits": e.fits, "at_once": e.at_once, "blocks_free": free}
    return Finding("queueing", share, text, " ".join(filter(None, settings)) or None, numbers)


def _fullness(e: Evidence) -> str:
    return (
        f"The KV cache of {e.blocks:,} blocks is too small: it holds {e.fits} sequences of {e.longest:,} tokens (19 of "
        f"20 are no longer), but up to {e.at_once} wanted to run at once."
    )


def _numbers(e: Evidence) -> dict[str, float]:
    return {"blocks": e.blocks, "fits": e.fits, "longest": e.longest, "at_once": e.at_once}


def _more_memory(e: Evidence, sequences: int | None = None) -> tuple[str | None, list[str]]:
    """Return what makes room for so many long sequences, by default for all that may run, and what else does."""
    wanted = _bytes_for(e, sequences or min(e.at_once, e.seats))
    ways = [f"engine.kv_memory={wanted}"] * bool(wanted) + ["model.dtype=bfloat16"] * (
        e.runner.get("dtype") == "float32"
    )
    return (ways[0], [f"{way} makes room for twice as many" for way in ways[1:]]) if ways else (None, [])


def _otherwise(others: list[str]) -> str:
    return f" Otherwise {', or '.join(others)}." if others else ""


def _bytes_for(e: Evidence, sequences: int) -> int:
    """Return the memory that the cache needs for so many long sequences; 0 where the device does not have it."""
    cache, weights = int(e.runner.get("kv_cache_bytes") or 0), int(e.runner.get("resident_weight_bytes") or 0)
    wanted = e.bytes_of(sequences * (e.longest + e.block_size))
    memory = e.hardware.get("memory")
    if not e.on_cpu:  # unasked, the cache has most of a GPU already
        memory = min((gpu["memory"] for gpu in e.hardware.get("gpus") or ()), default=None)
    fits = not memory or wanted + weights <= (1 - _SPARE) * memory
    return wanted if fits and wanted > cache else 0
