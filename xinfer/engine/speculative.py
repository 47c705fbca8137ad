"""Speculation: cheap guesses at the next tokens, which the next step checks all at once.

A guess is right exactly if it is what the sampler draws from the model's own logits at that place: so tokens are the
same with and without, greedy or sampled, and what a guess can win or lose is time alone. `Speculator` watches that
time, and guesses only as long as it wins.

Source of prompt look-up: Saxena, "Prompt Lookup Decoding", 2023; of drafts: Leviathan et al., 2023 (the acceptance rule
here is the coupled one: draft and target draw with the same random numbers).
"""

__all__ = ["DraftModelProposer", "NgramProposer", "Proposer", "Speculator"]

from dataclasses import dataclass
from typing import Any, Protocol

from xinfer.engine.batch import make_batch
from xinfer.engine.kv_cache import BlockPool
from xinfer.engine.outputs import StepStats
from xinfer.engine.runner import ModelRunner
from xinfer.engine.sampler import sample
from xinfer.engine.types import Limits, Sequence, State

_WARM = 6  # steps with and as many without guessing, before it is known which is faster
_PROBE = 48  # steps after which the slower of the two is tried again, for two steps
_WEIGHT = 0.2  # of the newest step in a moving average


class Proposer(Protocol):
    """What guesses."""

    def propose(self, sequences: list[Sequence], count: int) -> list[list[int]]:
        """Return up to `count` tokens for each sequence; none where there is nothing to go by."""

    def forget(self, sequence: Sequence) -> None:
        """Let go of what is kept of a sequence that has ended."""


@dataclass(slots=True)
class _Arm:
    """How fast tokens come one way: steps tried, and tokens a millisecond as a moving average."""

    steps: int = 0
    rate: float = 0.0

    def add(self, rate: float) -> None:
        self.steps += 1
        self.rate = rate if self.steps == 1 else self.rate + _WEIGHT * (rate - self.rate)


class Speculator:
    """Asks a proposer for drafts of `tokens` tokens, where that makes steps pay.

    Whether it does depends on how many sequences share a step, so the decision is one for each power of two; above
    `max_batch` sequences nothing is guessed, since rows are no longer nearly free there. With `always` it guesses
    whether that pays or not.
    """

    def __init__(self, proposer: Proposer, tokens: int = 4, max_batch: int = 16, *, always: bool = False) -> None:
        self.proposer, self.tokens, self.max_batch, self.always = proposer, tokens, max_batch, always
        self.proposed = self.accepted = self.steps = self.idle_steps = 0
        self._arms: dict[tuple[int, bool], _Arm] = {}
        self._guessing = False

    def propose(self, running: list[Sequence]) -> None:
        """Give the sequences that decode a draft each."""
        decoding = [s for s in running if s.state is State.DECODE and s.num_computed == len(s.token_ids) - 1]
        self._guessing = 0 < len(decoding) == len(running) <= self.max_batch and self._pays(len(running))
        if self._guessing:
            for sequence, draft in zip(decoding, self.proposer.propose(decoding, self.tokens), strict=True):
                sequence.draft = draft

    def observe(self, stats: StepStats) -> None:
        """Learn from a step that has been taken."""
        self.proposed += stats.draft_tokens
        self.accepted += stats.accepted_tokens
        if stats.stage == "decode" and stats.batch_size <= self.max_batch and stats.step_ms:
            self.steps += 1
            self.idle_steps += not self._guessing
            arm = self._arms.setdefault((stats.batch_size.bit_length(), self._guessing), _Arm())
            arm.add(stats.generated_tokens / stats.step_ms)

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence that has ended."""
        self.proposer.forget(sequence)

    def figures(self) -> dict[str, Any]:
        """Return what was guessed, how much of it was right, and in how many decode steps guessing was switched off."""
        share = self.accepted / self.proposed if self.proposed else None
        return {
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
            "acceptance_rate": share,
            "decode_steps": self.steps,
            "steps_switched_off": self.idle_steps,
        }

    def _pays(self, batch: int) -> bool:
        if self.always:
            return True
        size = batch.bit_length()
        guessing, plain = (self._arms.setdefault((size, on), _Arm()) for on in (True, False))
        if guessing.steps < _WARM or plain.steps < _WARM:
            return guessing.steps < _WARM
        probing = (guessing.steps + plain.steps) % _PROBE < 2
        return (guessing.rate >= plain.rate) != probing


class NgramProposer:
    """Guesses that what followed the last few tokens before follows them again: right where a text quotes its prompt.

    Args:
        longest, shortest: lengths of the end of the text that is looked for, the longest first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._follows: dict[Sequence, dict[tuple[int, ...], int]] = {}  # where a run of tokens was followed last
        self._seen: dict[Sequence, int] = {}

    def propose(self, sequences: list[Sequence], count: int) -> list[list[int]]:
        """See `Proposer.propose`."""
        return [self._guess(sequence, count) for sequence in sequences]

    def forget(self, sequence: Sequence) -> None:
        """See `Proposer.forget`."""
        self._follows.pop(sequence, None)
        self._seen.pop(sequence, None)

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        tokens, follows = sequence.token_ids, self._follows.setdefault(sequence, {})
        for end in range(self._seen.get(sequence, 1), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    follows[tuple(tokens[end - length : end])] = end
        self._seen[sequence] = len(tokens)
        places = (follows.get(tuple(tokens[-length:])) for length in self._lengths if length < len(tokens))
        place = next((place for place in places if place is not None), None)
        return [] if place is None else tokens[place : place + count]


class DraftModelProposer:
    """Guesses with a smaller model of the same vocabulary, which draws with the same random numbers.

    Args:
        runner: the small model, with a cache of its own.
        limits: its; a sequence for which its cache has no room gets no draft.
        vocab_size: ids that the large model knows; its rows may be narrower than the small one's.
    """

    def __init__(self, runner: ModelRunner, limits: Limits, vocab_size: int | None = None) -> None:
        self.runner, self.limits, self.vocab_size = runner, limits, vocab_size
        self.pool = BlockPool(runner.info, prefix_cache=False)
        self._shadows: dict[Sequence, Sequence] = {}

    def propose(self, sequences: list[Sequence], count: int) -> list[list[int]]:
        """See `Proposer.propose`."""
        shadows = {s: self._shadow(s) for s in sequences}
        able = [s for s in sequences if self._catch_up(shadows[s], len(s.token_ids) + count)]
        for _ in range(count if able else 0):
            batch = [shadows[s] for s in able]
            counts = [len(s.token_ids) - s.num_computed for s in batch]
            logits = self._forward(batch, counts, [1] * len(batch))
            for shadow, token in zip(batch, sample(logits[:, : self.vocab_size], batch), strict=True):
                shadow.token_ids.append(0 if token is None else token)
        return [shadows[s].token_ids[len(s.token_ids) :] for s in sequences]

    def forget(self, sequence: Sequence) -> None:
        """See `Proposer.forget`."""
        if (shadow := self._shadows.pop(sequence, None)) is not None:
            self.runner.free(self.pool.release(shadow))

    def _shadow(self, sequence: Sequence) -> Sequence:
        """Return the sequence as the small model sees it, what it had guessed wrong taken back."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            shadow = Sequence(sequence.request, [], sequence.limit, sample=sequence.sample)
            self._shadows[sequence] = shadow
        most = min(shadow.num_computed, len(sequence.token_ids) - 1)
        same = min(shadow.num_known, most)  # `num_known` of a shadow: tokens that were the sequence's own last time
        while same < most and shadow.token_ids[same] == sequence.token_ids[same]:
            same += 1
        shadow.token_ids, shadow.num_computed = list(sequence.token_ids), same
        shadow.num_known = len(sequence.token_ids)
        return shadow

    def _catch_up(self, shadow: Sequence, tokens: int) -> bool:
        """Compute all but the last of the shadow's tokens; False where the cache has no room for `tokens`."""
        if tokens > self.runner.info.max_model_len or not self.pool.grow(shadow, tokens):
            self.runner.free(self.pool.release(shadow))
            return False
        while (missing := len(shadow.token_ids) - 1 - shadow.num_computed) > 0:
            self._forward([shadow], [min(missing, self.limits.max_num_batched_tokens)], [0])
        return True

    def _forward(self, shadows: list[Sequence], counts: list[int], wanted: list[int]) -> Any:
        logits = self.runner.forward(make_batch(shadows, counts, wanted, self.pool.block_size))
        for shadow, count in zip(shadows, counts, strict=True):
            shadow.num_computed += count
        return logits
