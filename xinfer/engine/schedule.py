"""One step's plan: who takes part with how many tokens, and whose the rows of logits will be."""

__all__ = ["Schedule"]

from dataclasses import dataclass, field

from xinfer.engine.batch import make_batch
from xinfer.engine.kv_cache import BlockPool, Copy
from xinfer.engine.types import Batch, Sequence


@dataclass(slots=True)
class Schedule:
    """One step's plan.

    Attributes:
        sequences: those that take part, each with `counts[i]` of its own tokens and after them its `draft`.
        wanted: rows of logits for each of `sequences`.
        sampled: those that get a token, each from row `rows[i]` of the logits; its draft's rows follow that one.
        scored: those whose prompt gets logprobs from the rows beginning at the second number, as many as the third.
        copies: blocks that the runner copies first.
        guesses: drafted tokens that may still be taken in, so that those that run get what is theirs.
        preemptions: sequences put aside to make room.
        looked_up: tokens asked of the prefix cache for sequences that began to run; `found` of them were there.
        prefill_tokens, decode_tokens, draft_tokens: computed in the step; see `StepStats`.
    """

    budget: int
    logits_rows: int
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)
    batch: Batch = None  # type: ignore[assignment]
    copies: list[Copy] = field(default_factory=list)
    guesses: int = 0
    preemptions: int = 0
    looked_up: int = 0
    found: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0

    def take(self, sequence: Sequence, count: int) -> None:
        """Take a sequence in, with so many tokens, and with logits for those that need them: the last ones."""
        drafts = len(sequence.draft)
        complete = sequence.num_computed + count == len(sequence.token_ids)
        rows = count if sequence.scores else 1 + drafts if complete else 0
        self.sequences.append(sequence)
        self.counts.append(count)
        self.wanted.append(rows)
        self.budget -= count + drafts
        self.logits_rows -= rows

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out that was put aside after all."""
        if sequence in self.sequences:
            place = self.sequences.index(sequence)
            del self.sequences[place]
            self.budget += self.counts.pop(place) + len(sequence.draft)
            self.logits_rows += self.wanted.pop(place)

    def lay_out(self, pool: BlockPool) -> None:
        """Make the batch, and say which rows of logits are whose."""
        end = 0
        for sequence, count, rows in zip(self.sequences, self.counts, self.wanted, strict=True):
            end += rows
            computed, drafts = sequence.num_computed, len(sequence.draft)
            complete = computed + count == len(sequence.token_ids)
            if complete and count == 1 and computed >= sequence.num_prompt:
                self.decode_tokens += 1 + drafts
                self.draft_tokens += drafts
            else:
                self.prefill_tokens += count
            if rows and sequence.scores:
                self.scored.append((sequence, end - rows, rows - complete))
            if complete:
                self.sampled += [sequence, *sequence.siblings]
                self.rows += [end - 1 - drafts] * (1 + len(sequence.siblings))
        self.batch = make_batch(self.sequences, self.counts, self.wanted, pool.block_size)
        self.copies, pool.copies = pool.copies, []
