"""The engine: requests in, tokens out, one step at a time."""

__all__ = ["Engine", "Observers", "Tokenizer"]

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from xinfer.engine.admission import Admission, Tokenizer
from xinfer.engine.flight import Flight, looks, rows_of
from xinfer.engine.logits import LogitsProcessor
from xinfer.engine.logprobs import MODES
from xinfer.engine.observers import NOBODY, Observers
from xinfer.engine.outputs import RequestOutput, StepOutput, TokenOutput
from xinfer.engine.results import StepTimes, request_output, step_stats
from xinfer.engine.runner import ModelRunner
from xinfer.engine.sampler import Choice, Sampler
from xinfer.engine.scheduler import Scheduler, separates
from xinfer.engine.speculative import Speculator
from xinfer.engine.types import FinishReason, Limits, Request, SamplingParams, State
from xinfer.engine.types import Sequence as Seq
from xinfer.errors import ConfigError, RequestError

_NOTHING = torch.empty(0, 0)  # logits of a step that computes nothing


class Engine:
    """Runs requests on a runner.

    Args:
        runner: the backend.
        tokenizer: turns ids into text; None leaves texts empty.
        limits: what one step may hold, and how it is shared out.
        seed: the run's seed, of which each request's own is derived.
        eos_token_ids: tokens that end a text.
        observers: who wants to hear of steps, tokens and results.
        processors: what changes logits before tokens are chosen, in this order.
        speculator: guesses tokens that the next step then checks; None guesses nothing.
        logprobs_mode: what is told of tokens where it is asked for: one of `logprobs.MODES`.
        clock: seconds that only grow; all times are its.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        limits: Limits,
        *,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        observers: Observers = NOBODY,
        processors: Sequence[LogitsProcessor] = (),
        speculator: Speculator | None = None,
        logprobs_mode: str = "raw_logprobs",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if logprobs_mode not in MODES:
            raise ConfigError(f"engine.logprobs_mode={logprobs_mode!r} is unknown (there are: {', '.join(MODES)})")
        self.runner, self.observers, self.clock = runner, observers, clock
        vocab_size = min(runner.info.vocab_size, getattr(tokenizer, "max_token_id", runner.info.vocab_size - 1) + 1)
        self.admission = Admission(tokenizer, processors, vocab_size, eos_token_ids, seed)
        self.sampler = Sampler(processors, vocab_size, logprobs_mode)
        separate = separates(runner.info, limits)
        self.scheduler = Scheduler(limits, runner.info, separate, clock)
        self.speculator = None if separate else speculator
        self._sequences: dict[str, list[Seq]] = {}  # the samples of each request that have not ended
        self._looking: set[str] = set()  # requests for which no step is computed before their tokens are seen
        self._ahead: Flight | None = None  # the next step, if it is being computed already
        self._deadlines: list[tuple[float, str]] = []
        self._ended: list[RequestOutput] = []  # outside of a step, to be told by the next
        self._next_index = self._arrived = self._steps = 0

    @property
    def max_model_len(self) -> int:
        """The longest sequence that can run: what the model, the limits and the KV cache allow."""
        info, limit = self.runner.info, self.scheduler.limits.max_model_len
        return min(info.max_model_len, info.kv_tokens, limit or info.max_model_len)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._ended)

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step is being computed already, and somebody still waits for its tokens."""
        return self._ahead is not None and self._ahead.awaited

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        index: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        output_token_ids: Sequence[int] = (),
        sample: int = 0,
    ) -> Request:
        """Queue a request; a `RequestError` says why it can never run, an `OverloadedError` that it can't now.

        Args:
            prompt_token_ids: at least one id of the model's vocabulary.
            params: how its tokens are chosen.
            index: which request of the run this is, from which its seed is derived; by default the next one.
            priority: lower goes first, where the policy is `priority`.
            timeout_s: seconds from now after which it ends, done or not.
            cache_salt: the prefix cache serves only requests of the same salt.
            output_token_ids: what it has generated before, elsewhere; it goes on after that as it would have there.
            sample: which sample of a request that is, where it had several.
        """
        index = self._next_index if index is None else index
        if not 0 <= index < 2**32:
            raise RequestError(f"index={index} is out of range: a whole number below 2**32 is expected")
        if str(index) in self._sequences:
            raise RequestError(f"index={index} is in use by a request that still runs: take another")
        if timeout_s is not None and not timeout_s > 0:
            raise RequestError(f"timeout_s={timeout_s!r} is out of range: seconds above zero are expected")
        first = self.admission.sequence(
            prompt_token_ids,
            params,
            self.max_model_len,
            index=index,
            output_token_ids=output_token_ids,
            sample=sample,
            priority=priority,
            deadline=None if timeout_s is None else self.clock() + timeout_s,
            cache_salt=cache_salt,
            arrival=self._arrived,
        )
        request = first.request
        self.scheduler.add(first)
        self._next_index, self._arrived = max(self._next_index, index + 1), self._arrived + 1
        self._sequences[request.request_id] = [first, *first.siblings]
        if looks(first):
            self._looking.add(request.request_id)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request wherever it is; one that has ended, or never was, is no error."""
        for sequence in list(self._sequences.get(request_id, ())):
            self._ended.append(self._finish(sequence, reason))

    def run(self) -> Iterator[StepOutput]:
        """Step until nothing is left to do."""
        while self.has_work:
            yield self.step()

    def step(self) -> StepOutput:
        """Compute the next tokens of some sequences, and what follows from them."""
        times = StepTimes(self.clock)
        self._end_overdue(times.began)
        flight = (self._ahead if self.runs_ahead else None) or self._launch(times)
        self._settle(flight)
        self._ahead = self._launch(times, flight) if self._may_run_ahead(flight) else None
        tokens, finished = self._collect(flight, times)
        finished, self._ended = self._ended + finished, []
        if freed := self.scheduler.take_freed():
            self.runner.free(freed)
        stats = step_stats(self._steps, flight, self.scheduler.pool, times, len(tokens), self.runner.metrics())
        self._steps += 1
        if self.speculator is not None:
            self.speculator.observe(stats)
        output = StepOutput(tuple(tokens), tuple(finished), stats)
        self.observers.tell(output)
        return output

    def _launch(self, times: StepTimes, before: Flight | None = None) -> Flight:
        """Have a step computed; `before` is the one before it, if nobody has seen its tokens yet."""
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        if before is not None:
            before.name_tokens()
        plan, logits = self.scheduler.schedule(), _NOTHING
        assert plan.sequences or before or not self.scheduler.has_work, "a sequence was admitted that has no room"
        times.lap("schedule")
        for source, target, tokens in plan.copies:
            self.runner.copy(source, target, tokens)
        if plan.sequences:
            unseen = None if before is None or before.drawn is None else before.drawn.tokens
            logits = self.runner.forward(plan.batch if unseen is None else replace(plan.batch, drawn=unseen))
            times.lap("forward")
        drawn = self.sampler.draw(rows_of(logits, plan.rows), plan.sampled) if plan.sampled else None
        times.lap("sample")
        return Flight(plan, logits, drawn, self.scheduler.num_waiting)

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Whether the next step can be computed before this one's tokens are seen.

        It can't while there is a request for which tokens are more than the next step's input (see `looks`).
        """
        able = "ahead" in self.runner.info.capabilities and self.speculator is None
        return able and not self._looking and bool(flight.plan.sequences)

    def _settle(self, flight: Flight) -> None:
        """Count as computed what a step computes, and let samples go on from their prompt."""
        plan = flight.plan
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            if sequence.finish_reason is None:
                self.scheduler.computed(sequence, count)
        for sequence, row, count in plan.scored:
            self._score(sequence, flight.logits[row : row + count])
        for sequence in plan.sequences:
            if sequence.siblings and sequence.num_computed == sequence.num_prompt:
                self.scheduler.fork(sequence)

    def _collect(self, flight: Flight, times: StepTimes) -> tuple[list[TokenOutput], list[RequestOutput]]:
        """Give each sequence a token, and those of its draft that turn out right; end those that are done."""
        tokens: list[TokenOutput] = []
        finished: list[RequestOutput] = []
        active, drawn = list(zip(flight.plan.sampled, flight.plan.rows, strict=True)), flight.drawn
        while drawn is not None:
            times.lap("output")
            drawn.wait()
            times.lap("forward")
            choices = drawn.read()
            now = times.lap("sample")
            going: list[tuple[Seq, int]] = []
            for (sequence, row), choice in zip(active, choices, strict=True):
                if sequence.finish_reason is not None:
                    continue  # it ended while this was on its way
                reason = self._take(sequence, choice, now, tokens)
                if reason is not None:
                    finished.append(self._finish(sequence, reason))
                elif sequence.draft and sequence.draft.pop(0) == choice.token_id:
                    self.scheduler.computed(sequence, 1)
                    times.accepted += 1
                    going.append((sequence, row + 1))
                else:
                    sequence.draft.clear()
            active, drawn = going, None
            if going:
                times.lap("output")
                drawn = self.sampler.draw(rows_of(flight.logits, [row for _, row in going]), [s for s, _ in going])
                times.lap("sample")
        return tokens, finished

    def _take(self, sequence: Seq, choice: Choice, now: float, tokens: list[TokenOutput]) -> FinishReason | None:
        """Add a token to a sequence; return why the sequence ends with it, if it does."""
        if sequence.token_ids[-1] < 0:
            sequence.token_ids.pop()  # what kept its place
        if sequence.error is None and sequence.limit == sequence.num_prompt:
            return FinishReason.LENGTH  # nothing but its prompt was wanted
        sequence.error = sequence.error or choice.error
        if sequence.error is not None:
            return FinishReason.ERROR
        request, params, token = sequence.request, sequence.request.params, choice.token_id
        sequence.add(token)
        sequence.token_times.append(now)
        if sequence.state is State.PREFILL:
            sequence.enter(State.DECODE, now)
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        ends, text = token in request.eos_token_ids or token in params.stop_token_ids, ""
        if sequence.text is not None and (not ends or params.include_stop_str_in_output):
            generated = len(sequence.token_ids) - sequence.num_prompt
            text = sequence.text.push(token, generated >= params.min_tokens)
        tokens.append(TokenOutput(request, token, text, sequence.sample, choice.logprobs))
        if ends or (sequence.text is not None and sequence.text.stopped):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.limit else None

    def _score(self, sequence: Seq, logits: Tensor) -> None:
        """Keep the logprobs of the prompt's next tokens, from the rows before them."""
        first = len(sequence.prompt_logprobs) + 1
        tokens = sequence.token_ids[first : first + len(logits)]
        sequence.prompt_logprobs += self.sampler.score(logits, sequence, tokens)
        if not logits.amax(1).isfinite().all():
            sequence.error = "the model's logits are not finite (NaN or infinity) within the prompt"

    def _finish(self, sequence: Seq, reason: FinishReason) -> RequestOutput:
        tail = sequence.text.finish() if sequence.text is not None else ""
        sequence.finish_reason = reason
        sequence.siblings.clear()  # they are ended by whoever ends the request
        self.scheduler.remove(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        samples = self._sequences[sequence.request.request_id]
        samples.remove(sequence)
        if not samples:
            del self._sequences[sequence.request.request_id]
            self._looking.discard(sequence.request.request_id)
        return request_output(sequence, reason, tail)

    def _end_overdue(self, now: float) -> None:
        """End the requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            samples = self._sequences.get(request_id)
            if samples and samples[0].request.deadline == deadline:
                self.abort(request_id, FinishReason.TIMEOUT)
