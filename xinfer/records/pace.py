"""What made tokens late or uneven, or few: prompts, stalls, the work between steps, too few requests."""

__all__ = ["cache_misses", "decode_outliers", "host_bound", "interference", "long_prefill", "small_batch"]

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from xinfer.engine.stats import percentile
from xinfer.records.evidence import Evidence, Finding, Step
from xinfer.records.prefixes import Reuse, reuse

# A step that also computes prompts delays those that decode, always. From four times a decode step on people see a
# text stop; what is advised makes it three times, so that the advice, once taken, is not given again.
_STALL, _TOLERABLE = 4.0, 3.0
# Where nobody waits for a next token, a step's fixed cost may be a tenth of it; below that there is nothing to gain.
_FIXED = 0.1
# Decode steps are alike if neither sequences nor context differ by more than a factor of two: the work then explains a
# factor of two, but not three. It takes more than two such steps, for the first ones only warm up.
_OUTLIER, _FEWEST = 3.0, 3
# Work between the computing that takes a quarter of the time; some there must be: choosing tokens, writing the record.
_HOST = 0.25
# Half the requests coming in the very step after another ended: somebody waits for an answer before sending the next.
_FOLLOWS = 0.5
# A quarter of the places filled: up to four times as many, a step that reads all weights gets little longer.
_ROOM = 0.25
_PARTS = ("schedule_ms", "forward_ms", "sample_ms", "output_ms")
_OBSERVERS = {"xinfer_on_step", "xinfer_on_token", "xinfer_on_request_finished"}


def long_prefill(e: Evidence) -> Finding | None:
    """Prompts were computed in steps so small that their fixed cost shows."""
    full = [s for s in e.steps if s["prefill_tokens"] and s["prefill_tokens"] + s["decode_tokens"] >= e.budget]
    chunk = percentile((s["step_ms"] for s in full), 50)
    if chunk is None or e.fixed_ms is None or e.prefill_token_ms is None:
        return None
    shared = sum(s["decode_tokens"] > 0 for s in full) > len(full) / 2
    most = (_TOLERABLE - 1 if shared else 1 / _FIXED - 1) * e.fixed_ms / e.prefill_token_ms
    prompts = percentile((s["stats"]["prompt_tokens"] for s in e.run.samples), 95) or 2 * e.budget
    burst = prompts * max(1.0, percentile((e.crowd(s) for s in full), 50) or 1.0)
    budget = _power_of_two(min(most, burst))
    fixed, taken = min(1.0, e.fixed_ms / chunk), e.time(full) / e.total
    share = fixed * (1 - e.budget / budget) * taken
    if share < e.WORTH:
        return None
    text = (
        f"Prompts of up to {prompts:,.0f} tokens were computed in steps of engine.max_num_batched_tokens={e.budget}: "
        f"{len(full)} such steps took {taken:.0%} of the requests' time, and {fixed:.0%} of each is what a step costs "
        f"however little it does ({e.fixed_ms:,.1f} of {chunk:,.1f} ms). Larger ones spare about {share:.0%}."
    )
    numbers = {"steps": len(full), "prompt_tokens": prompts, "fixed_ms": e.fixed_ms, "step_ms": chunk}
    return Finding("long_prefill", share, text, f"engine.max_num_batched_tokens={budget}", numbers)


def cache_misses(e: Evidence) -> Finding | None:
    """Prompts that begin alike were computed from their beginning."""
    told = reuse(e.run, int(e.runner.get("hash_size", 16)))
    computed = sum(s["prefill_tokens"] for s in e.steps)
    time = sum(max(0.0, s["step_ms"] - (e.decode_ms or 0.0)) * e.crowd(s) for s in e.steps if s["prefill_tokens"])
    share = (told.possible - told.reused) / (computed or 1) * time / e.total
    if share < e.WORTH:
        return None
    setting, why = _why_missed(e, told)
    text = (
        f"Prompts begin alike, but that was not used: of {told.prompt:,} prompt tokens {told.possible:,} had been "
        f"computed for an earlier prompt, and {told.reused:,} were taken from there; computing the others again took "
        f"about {share:.0%} of the requests' time. {why}"
    )
    numbers = {"prompt_tokens": told.prompt, "possible": told.possible, "reused": told.reused}
    return Finding("cache_misses", share, text, setting, numbers)


def _why_missed(e: Evidence, told: Reuse) -> tuple[str | None, str]:
    if not e.limits["prefix_cache"]:
        return "engine.prefix_cache=true", "The prefix cache is off."
    if told.distinct <= e.kv_tokens:
        return None, "It would have had room for all of them, so requests differ in their cache_salt: give them one."
    why = f"Its {e.kv_tokens:,} tokens were taken by others in between."
    return f"engine.kv_memory={e.bytes_of(told.distinct + e.at_once * e.longest)}", why


def interference(e: Evidence) -> Finding | None:
    """Texts stood still while prompts were computed in the same steps."""
    decode = e.decode_ms
    if decode is None or e.prefill_token_ms is None:
        return None
    stalls = [s for s in e.steps if s["stage"] == "mixed" and s["step_ms"] > _STALL * decode]
    share = sum((s["step_ms"] - decode) * (s["decode_tokens"] - s["draft_tokens"]) for s in stalls) / e.total
    if share < e.WORTH:
        return None
    long, running = (percentile((s[name] for s in stalls), 50) or 0.0 for name in ("step_ms", "decode_tokens"))
    budget = round(running) + _power_of_two((_TOLERABLE - 1) * decode / e.prefill_token_ms)
    if budget >= e.budget:
        return None
    text = (
        f"Texts stood still while prompts were computed: {len(stalls)} steps that did both took {long:,.1f} ms "
        f"(median), {long / decode:.1f} times as long as one that only decodes ({decode:,.1f} ms), and {share:.0%} of "
        f"the requests' time. Less than engine.max_num_batched_tokens={e.budget} makes the pauses shorter, and "
        "first tokens a little later."
    )
    numbers = {"steps": len(stalls), "step_ms": long, "decode_ms": decode}
    return Finding("interference", share, text, f"engine.max_num_batched_tokens={budget}", numbers)


def decode_outliers(e: Evidence) -> Finding | None:
    """Some decode steps took much longer than others that did as much."""
    alike: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in e.decodes:
        alike[step["batch_size"].bit_length(), step["kv_tokens"].bit_length()].append(step)
    slow: list[tuple[Step, float]] = []
    for steps in alike.values():
        usual = percentile((s["step_ms"] for s in steps), 25) or 0.0
        slow += [(s, usual) for s in steps if s["step_ms"] > _OUTLIER * usual]
    share = sum((s["step_ms"] - usual) * e.crowd(s) for s, usual in slow) / e.total
    if len(slow) < _FEWEST or share < e.WORTH:
        return None
    ratio, usual = (percentile(v, 50) or 0.0 for v in ((s["step_ms"] / u for s, u in slow), (u for _, u in slow)))
    part = max(_PARTS, key=lambda name: sum(s[name] for s, _ in slow))
    copying = sum(s["copies"] > 0 for s, _ in slow)
    setting, why = _less_of(part, e)
    if 2 * copying > len(slow):
        setting, why = "sampling.n=1", f"In {copying} of them blocks were copied, for samples of the same prompt."
    text = (
        f"{len(slow)} of {len(e.decodes)} decode steps took {ratio:.1f} times as long (median) as others with about as "
        f"many sequences and tokens, which take {usual:,.1f} ms; what they took more is {share:.0%} of the requests' "
        f"time, most of it in {part.removesuffix('_ms')}. {why}"
    )
    return Finding("decode_outliers", share, text, setting, {"steps": len(slow), "ratio": ratio, "usual_ms": usual})


def host_bound(e: Evidence) -> Finding | None:
    """The device waited for what is done between its steps."""
    parts = _host_parts(e, e.steps)
    work = sum(s["step_ms"] for s in e.steps) + parts["between"]
    host = sum(parts.values()) / (work or 1.0)
    if host < _HOST:
        return None
    shares = {name.removesuffix("_ms"): milliseconds / work for name, milliseconds in parts.items()}
    setting, why = _less_of(max(parts, key=lambda name: parts[name]), e)
    text = (
        f"For {host:.0%} of the time nothing was computed though there was work: "
        f"{', '.join(f'{name} {share:.0%}' for name, share in shares.items())}. {why}"
    )
    return Finding("host_bound", host, text, setting, shares)


def _host_parts(e: Evidence, steps: Iterable[Step]) -> dict[str, float]:
    """Return milliseconds by part. Where a device computes on its own, sampling is where it is waited for."""
    names = ("schedule_ms", "sample_ms", "output_ms") if e.on_cpu else ("schedule_ms", "output_ms")
    parts = {name: sum(step[name] for step in steps) for name in names}
    return parts | {"between": sum(e.between.values())}


def _less_of(part: str, e: Evidence) -> tuple[str | None, str]:
    """Return what makes a part of the steps shorter, and why."""
    match part:
        case "forward_ms":
            threads = (e.config.get("backend") or {}).get("threads") or e.hardware.get("threads") or 1
            if e.on_cpu and threads > 1:
                why = f"Other work on the machine holds up all {threads} threads whenever it takes one's core."
                return f"backend.threads={threads - 1}", why
            return None, "Something else used the device: no setting changes that."
        case "sample_ms":
            return _less_sampling([request["params"] for request in e.run.requests.values()])
        case "schedule_ms" if e.limits.get("speculation", "off") != "off":
            return "engine.speculation=off", "Guessing tokens takes longer than it spares."
        case "between":
            seen = [p for p in e.run.info.get("plugins") or () if p["distribution"] != "xinfer"]
            slow = [p["name"] for p in seen if _OBSERVERS & set(p["hooks"])]
            if slow:
                rest = ",".join(p["name"] for p in seen if p["name"] not in slow)
                return f"XINFER_PLUGINS={rest}", f"Plugins look at every step: {', '.join(slow)}."
            return "record.steps=sample", "That is what hears of steps, such as the record, and who calls the engine."
    return None, "No setting changes that."


def _less_sampling(params: list[dict[str, object]]) -> tuple[str | None, str]:
    asked = {name for p in params for name in p.get("extra") or ()}  # type: ignore[attr-defined]
    if asked:
        return "sampling.extra={}", f"Requests ask for logits processors: {', '.join(sorted(asked))}."
    if any(p.get("logprobs") is not None for p in params):
        return "sampling.logprobs=null", "Requests ask for logprobs."
    if any(p.get("temperature") and not p.get("top_k") for p in params):
        return "sampling.top_k=64", "Tokens are drawn from the whole vocabulary; a limit changes what comes, if rarely."
    return None, "No setting changes that."


def small_batch(e: Evidence) -> Finding | None:
    """Few sequences ran at a time, for whoever sent them waited for answers."""
    ends = sorted(sample["history"][-1][1] for sample in e.run.samples)
    comes = [sample["history"][0][1] for sample in e.run.samples if sample["sample"] == 0]
    later = [when for when in comes if bisect_right(ends, when)]  # than the first end
    batch = sum(s["step_ms"] * s["batch_size"] for s in e.steps) / (sum(s["step_ms"] for s in e.steps) or 1.0)
    places, moment = min(e.seats, e.fits), (e.decode_ms or 0.0) / 1e3
    follows = sum(when - ends[bisect_right(ends, when) - 1] <= moment for when in later) / (len(later) or 1)
    if len(later) < e.FEW or follows < _FOLLOWS or batch > _ROOM * places:
        return None
    text = (
        f"{batch:.1f} sequences ran at a time, of {places} that may and fit, and {follows:.0%} of the requests came "
        "just when another had ended. A step reads all weights, for one sequence as for many: send more requests at "
        f"once, on the command line with --prompts-file or --requests, up to {places}."
    )
    numbers = {"batch": batch, "places": places, "follows": follows}
    return Finding("small_batch", 1 - batch / places, text, f"{places} requests at once", numbers)


def _power_of_two(value: float) -> int:
    """Return the greatest one that is not more."""
    return 1 << max(0, int(value).bit_length() - 1)
