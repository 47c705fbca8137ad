"""The engine: requests in, tokens out, one step at a time."""

__all__ = ["Engine", "Observers", "Tokenizer"]

import heapq
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from torch import Tensor

from xinfer.engine.admission import Admission, Tokenizer
from xinfer.engine.logits import LogitsProcessor
from xinfer.engine.logprobs import MODES
from xinfer.engine.observers import NOBODY, Observers
from xinfer.engine.outputs import RequestOutput, StepOutput, TokenOutput
from xinfer.engine.results import StepTimes, request_output, step_stats
from xinfer.engine.runner import LEVELS, ModelRunner
from xinfer.engine.sampler import Choice, Sampler
from xinfer.engine.schedule import Schedule
from xinfer.engine.scheduler import Scheduler
from xinfer.engine.speculative import Speculator
from xinfer.engine.types import FinishReason, Limits, Request, SamplingParams, State
from xinfer.engine.types import Sequence as Seq
from xinfer.errors import ConfigError, RequestError


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
        separate = _separate(runner, limits)
        self.scheduler = Scheduler(limits, runner.info, separate, clock)
        self.speculator = None if separate else speculator
        self._sequences: dict[str, list[Seq]] = {}  # the samples of each request that have not ended
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
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        plan = self.scheduler.schedule()
        times.scheduled()
        logits = self._forward(plan)
        times.forwarded()
        waiting = self.scheduler.num_waiting
        tokens, finished = self._collect(plan, logits, times) if logits is not None else ([], [])
        finished, self._ended = self._ended + finished, []
        if freed := self.scheduler.take_freed():
            self.runner.free(freed)
        pool = self.scheduler.pool
        stats = step_stats(self._steps, plan, pool, waiting, times, len(tokens), self.runner.metrics())
        self._steps += 1
        if self.speculator is not None:
            self.speculator.observe(stats)
        output = StepOutput(tuple(tokens), tuple(finished), stats)
        self.observers.tell(output)
        return output

    def _forward(self, plan: Schedule) -> Tensor | None:
        if not plan.sequences:
            return None
        for source, target, tokens in plan.copies:
            self.runner.copy(source, target, tokens)
        return self.runner.forward(plan.batch)

    def _collect(
        self, plan: Schedule, logits: Tensor, times: StepTimes
    ) -> tuple[list[TokenOutput], list[RequestOutput]]:
        """Give each sequence a token, and those of its draft that turn out right; end those that are done."""
        tokens: list[TokenOutput] = []
        finished: list[RequestOutput] = []
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            self.scheduler.computed(sequence, count)
        for sequence, row, count in plan.scored:
            self._score(sequence, logits[row : row + count])
        for sequence in plan.sequences:
            if sequence.siblings and sequence.num_computed == sequence.num_prompt:
                self.scheduler.fork(sequence)
        active = list(zip(plan.sampled, plan.rows, strict=True))
        while active:
            going: list[tuple[Seq, int]] = []
            for (sequence, row), choice in zip(active, self._choose(logits, active, times), strict=True):
                reason = self._take(sequence, choice, times.sampled, tokens)
                if reason is not None:
                    finished.append(self._finish(sequence, reason))
                elif sequence.draft and sequence.draft.pop(0) == choice.token_id:
                    self.scheduler.computed(sequence, 1)
                    times.accepted += 1
                    going.append((sequence, row + 1))
                else:
                    sequence.draft.clear()
            active = going
        return tokens, finished

    def _choose(self, logits: Tensor, active: list[tuple[Seq, int]], times: StepTimes) -> list[Choice]:
        """Sample a token for each of these sequences from its row of logits."""
        began = self.clock()
        rows = [row for _, row in active]
        everything = len(rows) == len(logits) and rows == list(range(len(rows)))
        choices = self.sampler(logits if everything else logits[rows], [sequence for sequence, _ in active])
        times.sample_s += self.clock() - began
        times.sampled = self.clock()
        return choices

    def _take(self, sequence: Seq, choice: Choice, now: float, tokens: list[TokenOutput]) -> FinishReason | None:
        """Add a token to a sequence; return why the sequence ends with it, if it does."""
        if sequence.error is None and len(sequence.token_ids) >= sequence.limit:
            return FinishReason.LENGTH  # nothing but its prompt was wanted
        sequence.error = sequence.error or choice.error
        if sequence.error is not None:
            return FinishReason.ERROR
        request, params, token = sequence.request, sequence.request.params, choice.token_id
        sequence.token_ids.append(token)
        sequence.token_times.append(now)
        if sequence.state is State.PREFILL:
            sequence.enter(State.DECODE, now)
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        if sequence.counts is not None:
            sequence.counts[token] += 1
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
        return request_output(sequence, reason, tail)

    def _end_overdue(self, now: float) -> None:
        """End the requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            samples = self._sequences.get(request_id)
            if samples and samples[0].request.deadline == deadline:
                self.abort(request_id, FinishReason.TIMEOUT)


def _separate(runner: ModelRunner, limits: Limits) -> bool:
    """Whether prompts and generated tokens must not meet; refuses `invariant` where the runner can't promise it."""
    info = runner.info
    if not limits.invariant:
        return False
    if missing := LEVELS - info.levels:
        raise ConfigError(
            f"engine.determinism=invariant: the backend does not promise {', '.join(sorted(missing))} on "
            f"{info.device} in {info.dtype}: take engine.determinism=fast, or another backend, device or precision"
        )
    separate = "decode_differs" in info.capabilities
    sizes = {"max_num_batched_tokens": limits.max_num_batched_tokens, "max_logits_rows": limits.logits_rows}
    for name, most in sizes.items():
        if separate and most < 4:
            raise ConfigError(
                f"engine.{name}={most} is too few for this backend in engine.determinism=invariant: "
                "at least 4 are needed, so that no piece of a prompt is a single token"
            )
    return separate
