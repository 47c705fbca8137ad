"""Who computes what in the next step: continuous batching under a token budget and a number of sequences.

There is no prefill phase and no decode phase: each sequence has tokens, of which some are in the KV cache, and a step
computes the next ones. A decode step is the case where one is missing.
"""

__all__ = ["Scheduler", "separates"]

import heapq
from collections.abc import Callable
from time import perf_counter

from xinfer.engine.kv_cache import BlockPool
from xinfer.engine.runner import LEVELS, RunnerInfo
from xinfer.engine.schedule import Schedule
from xinfer.engine.types import Limits, Sequence, State
from xinfer.errors import ConfigError, OverloadedError

_OVERTAKING_STEPS = 128  # by which a running request must be due later than one that waits to give it its place
_PRIORITY_STEPS = 256  # steps that a request of the next lower priority waits for one that has just come
_STEP_TOKENS = 64  # tokens of prompt and output for which a request yields to those that come a step later


class Scheduler:
    """Chooses each step's tokens: one for each sequence that decodes, then prompts, then requests that wait.

    A sequence that finds no block takes those of the youngest one of the lowest priority; what that had computed is
    computed again later. Policies:

    - `fcfs`: in the order of arrival.
    - `priority`: by a virtual time: the step of arrival, later by 256 steps for each number of `Request.priority` and
      by one for each 64 tokens of prompt and output. So urgent and short requests overtake, yet nothing starves:
      whoever waits is ahead of all that come late enough. One that waits in vain takes the place of a running one
      whose virtual time is later by half a priority.

    Args:
        separate: never compute single tokens (generated ones, also again, and prompts of one) and longer pieces of
            prompts in one step, for runners in which a row depends on that (`decode_differs`).
        clock: seconds, for the times at which states begin.
    """

    def __init__(
        self, limits: Limits, info: RunnerInfo, separate: bool = False, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.limits, self.separate, self.clock = limits, separate, clock
        self.pool = BlockPool(info, limits.prefix_cache)
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[float, int, int], Sequence]] = []  # a heap; those that left it stay until met
        self.num_waiting = 0
        self._freed: list[int] = []
        self._steps = 0
        self._prefilled = False  # whether the last step computed prompts, where they are kept apart

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.num_waiting or self.running)

    @property
    def waiting(self) -> list[Sequence]:
        """Those that wait, the next one first."""
        return [entry[1] for entry in sorted(e for e in self._waiting if e[1].queued)]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a full queue is an `OverloadedError`."""
        if self.num_waiting >= self.limits.max_queue:
            raise OverloadedError(
                f"{self.num_waiting} requests wait already, and engine.max_queue={self.limits.max_queue}: "
                "try again later, or raise it"
            )
        request = sequence.request
        virtual = 0.0
        if self.limits.policy == "priority":
            virtual = self._steps + _PRIORITY_STEPS * request.priority + sequence.limit / _STEP_TOKENS
        sequence.key = (virtual, request.arrival, sequence.sample)
        for sample in (sequence, *sequence.siblings):
            sample.enter(State.WAITING, self.clock())
        self._push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is, and its blocks with it."""
        if sequence.running:
            self.running.remove(sequence)
        elif sequence.queued:
            sequence.queued = False
            self.num_waiting -= 1
        self._freed += self.pool.release(sequence)
        sequence.enter(State.FINISHED, self.clock())

    def take_freed(self) -> list[int]:
        """Return the blocks given back since the last call, less those that somebody holds again."""
        freed, self._freed = self._freed, []
        return self.pool.only_free(freed) if freed else freed

    def schedule(self) -> Schedule:
        """Choose the next step's tokens; there are none only if nothing is left to do, or known of what there is."""
        plan = Schedule(self.limits.max_num_batched_tokens, self.limits.logits_rows)
        plan.guesses = (min(plan.budget, plan.logits_rows) - len(self.running)) // (2 if self.num_waiting else 1)
        self._steps += 1
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if not sequence.ending:
                (decoding if self._decodes(sequence) else prefilling).append(sequence)
        prefilling.sort(key=lambda s: s.key)
        prompts_first = self.separate and not self._prefilled
        for turn in (False, True) if not prompts_first else (True, False):
            if self.separate and plan.sequences:
                break
            for sequence in prefilling if turn else decoding:
                self._continue(plan, sequence)
            if turn or self.separate:
                self._admit(plan, turn)
            self._prefilled = turn
        plan.lay_out(self.pool)
        return plan

    def computed(self, sequence: Sequence, count: int) -> None:
        """Note that so many tokens more are in the cache; what of them is whole can be reused."""
        sequence.num_computed += count
        if (sequence.num_known + 1) * self.pool.grain <= sequence.num_computed:
            self.pool.register(sequence, sequence.num_prompt if self.separate else None)

    def fork(self, sequence: Sequence) -> None:
        """Let the other samples go on from a prompt that has just been computed."""
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            sibling.key = (*sequence.key[:2], sibling.sample)
            sibling.history = list(sequence.history)
            sibling.num_cached = sequence.num_cached
            if len(self.running) < self.limits.max_num_seqs:
                sibling.state = sequence.state
                self.pool.fork(sequence, sibling, least=2 if self.separate else 1)
                self.running.append(sibling)
            else:
                sibling.enter(State.PREEMPTED, self.clock())
                self._push(sibling)

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether what comes next is a generated token, rather than a prompt or a text computed again."""
        missing = len(sequence.token_ids) - sequence.num_computed
        if self.separate:
            return sequence.num_computed >= sequence.num_prompt or sequence.num_prompt == 1
        return missing == 1 and sequence.num_computed >= sequence.num_prompt

    def _continue(self, plan: Schedule, sequence: Sequence) -> None:
        """Take a running sequence in, if budget and blocks are there, or can be had from others."""
        if not sequence.running or not (count := self._count(plan, sequence)):
            sequence.draft.clear()
            return
        if sequence.draft:
            self._trim_draft(plan, sequence, count)
            if not self.pool.grow(sequence, sequence.num_computed + count + len(sequence.draft)):
                sequence.draft.clear()  # a guess is not worth anybody's place
        while not self.pool.grow(sequence, sequence.num_computed + count):
            victim = max(self.running, key=lambda s: (s.request.priority, s.request.arrival, s.sample))
            self._preempt(plan, victim)
            if victim is sequence:
                return
        plan.take(sequence, count)

    def _count(self, plan: Schedule, sequence: Sequence) -> int:
        """Return how many of the sequence's tokens fit into this step."""
        missing = len(sequence.token_ids) - sequence.num_computed
        if self.separate:
            missing = 1 if self._decodes(sequence) else sequence.num_prompt - sequence.num_computed
        count = min(missing, plan.budget)
        if sequence.scores:
            count = min(count, plan.logits_rows)
        elif sequence.num_computed + count == len(sequence.token_ids) and not plan.logits_rows:
            return 0
        if self.separate and missing > 1:  # neither this piece nor the last may be a single token
            count -= missing - count == 1
            count = count if count > 1 else 0
        return count

    def _trim_draft(self, plan: Schedule, sequence: Sequence, count: int) -> None:
        """Leave no more of a draft than the step, the logits, and the sequence's end allow."""
        complete = sequence.num_computed + count == len(sequence.token_ids)
        left = sequence.limit - len(sequence.token_ids) - 1
        del sequence.draft[max(0, min(left, plan.guesses) if complete else 0) :]
        plan.guesses -= len(sequence.draft)

    def _admit(self, plan: Schedule, prompts: bool) -> None:
        """Let those that wait begin, the next one first, as long as there is room for all of one's tokens.

        A prompt of one token is computed as a generated one is: where those are kept apart, `prompts` says whose turn
        it is.
        """
        if plan.preemptions:
            return  # there was not even room for those that run
        while plan.budget > 0 and (sequence := self._next()) is not None:
            if self.separate and prompts == (sequence.num_prompt == 1):
                return
            if len(self.running) >= self.limits.max_num_seqs or not self.pool.admit(sequence, self._reusable(sequence)):
                if not self._overtakes(plan, sequence):
                    return
                continue
            known = sequence.num_computed
            count = self._count(plan, sequence)
            if not count or not self.pool.grow(sequence, known + count):
                self._freed += self.pool.release(sequence)
                return
            if sequence.num_prompt >= len(sequence.token_ids):
                sequence.num_cached = known
            plan.looked_up += self._reusable(sequence)
            plan.found += known
            heapq.heappop(self._waiting)
            sequence.queued = False
            self.num_waiting -= 1
            self.running.append(sequence)
            sequence.enter(State.PREFILL, self.clock())
            plan.take(sequence, count)

    def _reusable(self, sequence: Sequence) -> int:
        """Return how many tokens may come from the cache: at least one is computed, for there must be logits."""
        if not self.limits.prefix_cache or sequence.scores:
            return 0
        return max(0, sequence.num_prompt - 2 if self.separate else len(sequence.token_ids) - 1)

    def _overtakes(self, plan: Schedule, sequence: Sequence) -> bool:
        """Put a running sequence aside for one that waits, if the policy says that this one is due much earlier."""
        if self.limits.policy != "priority" or not self.running:
            return False
        victim = max(self.running, key=lambda s: s.key)
        due = victim.key[0] >= sequence.key[0] + _OVERTAKING_STEPS
        if due:
            self._preempt(plan, victim)
        return due

    def _preempt(self, plan: Schedule, victim: Sequence) -> None:
        """Put a running sequence back among those that wait; its tokens will be computed again."""
        plan.drop(victim)
        plan.preemptions += 1
        self.running.remove(victim)
        self._freed += self.pool.release(victim)
        victim.draft.clear()
        if victim.scores:
            victim.prompt_logprobs.clear()
        victim.enter(State.PREEMPTED, self.clock())
        self._push(victim)

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.key, sequence))
        sequence.queued = True
        self.num_waiting += 1

    def _next(self) -> Sequence | None:
        while self._waiting and not self._waiting[0][1].queued:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None


def separates(info: RunnerInfo, limits: Limits) -> bool:
    """Whether prompts and generated tokens must not meet; refuses `invariant` where the runner can't promise it."""
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
