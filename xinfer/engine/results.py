"""From what happened to what is told of it: a sample's result, a step's figures."""

__all__ = ["StepTimes", "request_output", "step_stats"]

from collections.abc import Callable, Mapping
from typing import Any

from xinfer.engine.flight import Flight
from xinfer.engine.kv_cache import BlockPool
from xinfer.engine.outputs import RequestOutput, StepStats
from xinfer.engine.stats import request_stats
from xinfer.engine.types import FinishReason, Sequence


class StepTimes:
    """A step's times as it goes, in seconds, and how many guessed tokens were right.

    Attributes:
        began: when it did.
        accepted: of the guessed tokens.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.began = self._last = clock()
        self._seconds = dict.fromkeys(("schedule_ms", "forward_ms", "sample_ms", "output_ms"), 0.0)
        self.accepted = 0

    def lap(self, part: str) -> float:
        """Count what has passed since the last lap as `part`_ms; return the time."""
        now = self._clock()
        self._seconds[f"{part}_ms"] += now - self._last
        self._last = now
        return now

    def parts(self) -> dict[str, Any]:
        """Return the parts up to now, in milliseconds."""
        self.lap("output")
        parts = {name: seconds * 1e3 for name, seconds in self._seconds.items()}
        return parts | {"step_ms": sum(parts.values())}


def step_stats(
    step: int,
    flight: Flight,
    pool: BlockPool,
    times: StepTimes,
    brought: int,
    metrics: Mapping[str, Any],
) -> StepStats:
    """Return a step's figures; `metrics` are those that the runner tells of its device, `brought` its tokens."""
    plan = flight.plan
    prefill, decode, drafts = plan.prefill_tokens, plan.decode_tokens, plan.draft_tokens
    parts = times.parts()
    stage = "mixed" if prefill and decode else "prefill" if prefill else "decode" if decode else "idle"
    return StepStats(
        step=step,
        time=times.began,
        stage=stage,
        prefill_tokens=prefill,
        decode_tokens=decode,
        generated_tokens=brought,
        draft_tokens=drafts,
        accepted_tokens=times.accepted,
        cached_tokens=plan.found,
        batch_size=len(plan.sequences),
        scheduler_queue_length=flight.waiting,
        preemptions=plan.preemptions,
        copies=len(plan.copies),
        kv_tokens=int(plan.batch.context_lens.sum()),
        kv_blocks_used=pool.num_used,
        kv_blocks_free=pool.num_free,
        kv_cache_miss_rate=1 - plan.found / plan.looked_up if plan.looked_up else None,
        decode_step_time=parts["step_ms"] if stage == "decode" else None,
        **parts,
        **metrics,
    )


def request_output(sequence: Sequence, reason: FinishReason, tail: str) -> RequestOutput:
    """Return what a sample that has ended brought."""
    request, params = sequence.request, sequence.request.params
    cached = sequence.num_cached if sequence.sample == 0 else sequence.num_prompt
    scored = params.prompt_logprobs is not None and sequence.sample == 0 and sequence.error is None
    return RequestOutput(
        request_id=request.request_id,
        index=request.index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(sequence.output_token_ids),
        text=sequence.text.text if sequence.text is not None else "",
        tail=tail,
        finish_reason=reason,
        params=params,
        seed=request.seed,
        stats=request_stats(
            sequence.num_prompt, cached, sequence.history, sequence.token_times, request.seed, sequence.sample
        ),
        history=tuple((str(state), when) for state, when in sequence.history),
        token_times=tuple(sequence.token_times),
        error=sequence.error,
        sample=sequence.sample,
        logprobs=tuple(sequence.logprobs) if params.logprobs is not None else None,
        prompt_logprobs=(None, *sequence.prompt_logprobs) if scored else None,
    )
