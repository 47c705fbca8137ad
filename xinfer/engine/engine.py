"""The engine: requests in, tokens out, one step at a time."""

__all__ = ["Engine", "Observers", "Tokenizer"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import numpy as np

from xinfer.engine.detokenizer import TextStream
from xinfer.engine.logits import LogitsProcessor
from xinfer.engine.random import derive
from xinfer.engine.runner import ModelRunner
from xinfer.engine.sampler import sample
from xinfer.engine.scheduler import Schedule, Scheduler
from xinfer.engine.stats import request_stats
from xinfer.engine.types import (
    FinishReason,
    Limits,
    Request,
    RequestOutput,
    SamplingParams,
    State,
    StepOutput,
    StepStats,
    TokenOutput,
)
from xinfer.engine.types import Sequence as Seq
from xinfer.errors import RequestError


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Functions that hear of events. They get immutable snapshots and must not raise; empty costs nothing."""

    on_step: tuple[Callable[[StepOutput], None], ...] = ()
    on_token: tuple[Callable[[Request, TokenOutput], None], ...] = ()
    on_request_finished: tuple[Callable[[RequestOutput], None], ...] = ()


class Engine:
    """Runs requests on a runner.

    Args:
        runner: the backend.
        tokenizer: turns ids into text; None leaves texts empty.
        limits: what one step may hold.
        seed: the run's seed, of which each request's own is derived.
        eos_token_ids: tokens that end a text.
        observers: who wants to hear of steps, tokens and results.
        processors: what changes logits before tokens are chosen, in this order.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        limits: Limits,
        *,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        observers: Observers = Observers(),
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.runner, self.tokenizer, self.seed = runner, tokenizer, seed
        self.scheduler = Scheduler(limits, runner.info)
        self.observers = observers
        self.processors = {processor.name: processor for processor in processors}
        self._eos = frozenset(eos_token_ids)
        self._sequences: dict[str, Seq] = {}
        self._aborted: list[RequestOutput] = []
        self._added = self._steps = 0

    @property
    def max_model_len(self) -> int:
        """The longest sequence that can run: what the model, the limits and the KV cache allow."""
        info, limit = self.runner.info, self.scheduler.limits.max_model_len
        return min(info.max_model_len, info.kv_tokens, limit or info.max_model_len)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._aborted)

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, index: int | None = None
    ) -> Request:
        """Queue a request; a `RequestError` says why it can never run.

        Args:
            prompt_token_ids: at least one id of the model's vocabulary.
            params: how its tokens are chosen.
            index: which request of the run this is, from which its seed is derived; by default the next one.
        """
        index = self._added if index is None else index
        if not 0 <= index < 2**32:
            raise RequestError(f"index={index} is out of range: a whole number below 2**32 is expected")
        seed = derive(self.seed, index) if params.seed is None else int(params.seed)
        prompt = self._checked(prompt_token_ids, params.max_tokens)
        for name, arguments in params.extra.items():
            if name not in self.processors:
                there = ", ".join(self.processors) or "none"
                raise RequestError(f"extra names {name!r}, but there is no such logits processor (there are: {there})")
            self.processors[name].check(arguments)
        request = Request(f"{index}", index, prompt, params, seed, frozenset() if params.ignore_eos else self._eos)
        if request.request_id in self._sequences:
            raise RequestError(f"index={index} is in use by a request that still runs: take another")
        limit = min(len(prompt) + (params.max_tokens or self.max_model_len), self.max_model_len)
        sequence = Seq(request, list(prompt), limit, self._text(request))
        self._added = max(self._added, index + 1)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        return request

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; one that has ended, or never was, is no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._aborted.append(self._finish(sequence, FinishReason.ABORT))

    def step(self) -> StepOutput:
        """Compute the next tokens of some sequences, and what follows from them."""
        times = [perf_counter()]
        plan = self.scheduler.schedule()
        times.append(perf_counter())
        tokens: list[int | None] = []
        if plan.sequences:
            logits = self.runner.forward(plan.batch)
            times.append(perf_counter())
            for processor in self.processors.values():
                logits = processor.apply(logits, plan.sampled)
            tokens = sample(logits, plan.sampled)
        times += [perf_counter()] * (4 - len(times))
        return self._told(self._output(plan, tokens, times))

    def run(self) -> Iterator[StepOutput]:
        """Step until nothing is left to do."""
        while self.has_work:
            yield self.step()

    def _output(self, plan: Schedule, tokens: list[int | None], times: list[float]) -> StepOutput:
        """Give each sequence its token and end those that are done."""
        waiting, decode = len(self.scheduler.waiting), sum(map(_decodes, plan.sequences, plan.counts))
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            sequence.num_computed += count
        finished, self._aborted = self._aborted, []
        news: list[TokenOutput] = []
        for sequence, token in zip(plan.sampled, tokens, strict=True):
            if token is None:
                sequence.error = "the model's logits are not finite (NaN or infinity) at this position"
                finished.append(self._finish(sequence, FinishReason.ERROR))
                continue
            reason, text = self._append(sequence, token, times[-1])
            news.append(TokenOutput(sequence.request, token, text))
            if reason is not None:
                finished.append(self._finish(sequence, reason))
        if freed := self.scheduler.take_freed():
            self.runner.free(freed)
        stats = self._stats(plan, decode, waiting, [*times, perf_counter()])
        return StepOutput(tuple(news), tuple(finished), stats)

    def _stats(self, plan: Schedule, decode: int, waiting: int, times: list[float]) -> StepStats:
        prefill = sum(plan.counts) - decode
        self._steps += 1
        return StepStats(
            step=self._steps - 1,
            time=times[0],
            stage="mixed" if prefill and decode else "prefill" if prefill else "decode" if decode else "idle",
            prefill_tokens=prefill,
            decode_tokens=decode,
            batch_size=len(plan.sequences),
            scheduler_queue_length=waiting,
            preemptions=plan.preemptions,
            kv_tokens=int(plan.batch.context_lens.sum()),
            kv_blocks_used=self.scheduler.pool.num_used,
            kv_blocks_free=self.scheduler.pool.num_free,
            **_milliseconds(times),
        )

    def _told(self, output: StepOutput) -> StepOutput:
        """Tell the observers, now that all is in order, so that one of them may abort a request."""
        for on_token in self.observers.on_token:
            for token in output.tokens:
                on_token(token.request, token)
        for on_finished in self.observers.on_request_finished:
            for result in output.finished:
                on_finished(result)
        for on_step in self.observers.on_step:
            on_step(output)
        return output

    def _append(self, sequence: Seq, token: int, now: float) -> tuple[FinishReason | None, str]:
        """Add a token to a sequence; return why the sequence ends with it, if it does, and the new text."""
        params = sequence.request.params
        sequence.token_ids.append(token)
        sequence.token_times.append(now)
        ends = token in sequence.request.eos_token_ids or token in params.stop_token_ids
        text = ""
        if sequence.text is not None and (not ends or params.include_stop_str_in_output):
            text = sequence.text.push(token)
        if ends or (sequence.text is not None and sequence.text.stopped):
            return FinishReason.STOP, text
        return (FinishReason.LENGTH if len(sequence.token_ids) >= sequence.limit else None), text

    def _finish(self, sequence: Seq, reason: FinishReason) -> RequestOutput:
        request, text = sequence.request, sequence.text
        tail = text.finish() if text is not None else ""
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        del self._sequences[request.request_id]
        started = next((t for state, t in sequence.history if state is State.RUNNING), None)
        arrived, ended = sequence.history[0][1], sequence.history[-1][1]
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(sequence.output_token_ids),
            text=text.text if text is not None else "",
            tail=tail,
            finish_reason=reason,
            params=request.params,
            seed=request.seed,
            stats=request_stats(sequence.num_prompt, arrived, started, sequence.token_times, ended, request.seed),
            history=tuple((str(state), when) for state, when in sequence.history),
            token_times=tuple(sequence.token_times),
            error=sequence.error,
        )

    def _text(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        tokenizer, params = self.tokenizer, request.params
        skip = params.skip_special_tokens
        return TextStream(
            lambda ids: tokenizer.decode(ids, skip),
            request.prompt_token_ids,
            params.stop,
            params.include_stop_str_in_output,
        )

    def _checked(self, prompt: Sequence[int], max_tokens: int | None) -> tuple[int, ...]:
        """Return the prompt as plain ints, or refuse it."""
        vocab, longest = self.runner.info.vocab_size, self.max_model_len
        if not len(prompt):
            raise RequestError("the prompt has no tokens: give it at least one")
        for token in prompt:
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not whole or not 0 <= token < vocab:
                raise RequestError(f"prompt token {token!r} is not an id of the vocabulary (0 to {vocab - 1})")
        wanted = len(prompt) + (1 if max_tokens is None else max_tokens)
        if len(prompt) >= longest:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {longest} with at least one generated: "
                "shorten it, or raise engine.max_model_len if the model allows"
            )
        if wanted > longest:
            raise RequestError(
                f"the prompt's {len(prompt)} tokens and max_tokens={max_tokens} make {wanted}, but the context holds "
                f"{longest}: lower max_tokens, or leave it null to fill the context"
            )
        return tuple(int(t) for t in prompt)


def _decodes(sequence: Seq, count: int) -> bool:
    """Whether a step computes just the token that was generated last, rather than a prompt, or a text once more."""
    return count == 1 and sequence.num_prompt <= sequence.num_computed == len(sequence.token_ids) - 1


def _milliseconds(times: list[float]) -> dict[str, float]:
    """Turn the five times at a step's seams into its parts."""
    parts = [(b - a) * 1e3 for a, b in pairwise(times)]
    return dict(zip(("schedule_ms", "forward_ms", "sample_ms", "output_ms"), parts, strict=True), step_ms=sum(parts))
