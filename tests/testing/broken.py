"""Runners that are wrong in one way each, around one that is right, and the test of the kit that must find out."""

__all__ = ["CAUGHT_BY", "RunsAhead", "TakesNamesForTokens"]

import threading
from dataclasses import replace

import numpy as np
import torch

from xinfer.backends.torch import create
from xinfer.engine.runner import LEVELS, ModelRunner

SCRATCH = 40  # blocks that a wrapped runner keeps for itself


class Wrong(ModelRunner):
    """Does all as the runner that it wraps, until something is overridden."""

    def __init__(self, context):
        self.context = context
        self.real = create(context)
        self.info = self.real.info

    def forward(self, batch):
        return self.real.forward(batch)

    def copy(self, source, target, tokens):
        self.real.copy(source, target, tokens)

    def free(self, blocks):
        self.real.free(blocks)

    def close(self):
        self.real.close()


class RunsAhead(Wrong):
    """Wrong in nothing: its device is the host, so that tokens could be seen at once."""

    def __init__(self, context):
        super().__init__(context)
        self.info = replace(self.info, capabilities=self.info.capabilities | {"ahead"})


class TakesNamesForTokens(RunsAhead):
    def forward(self, batch):
        return self.real.forward(replace(batch, token_ids=np.maximum(batch.token_ids, 0), drawn=None))


class WithScratch(Wrong):
    """Has blocks of its own behind those that it reports."""

    def __init__(self, context):
        super().__init__(replace(context, limits=replace(context.limits, max_num_seqs=16)))
        num_blocks = self.info.num_blocks - SCRATCH
        self.info = replace(self.info, num_blocks=num_blocks, kv_tokens=num_blocks * self.info.block_size)

    def scratch(self, lengths):
        """Block tables and slots of new sequences of these lengths."""
        size = self.info.block_size
        counts = [-(-length // size) for length in lengths]
        tables = np.full((len(lengths), max(counts)), -1, np.int32)
        first = self.info.num_blocks
        for row, count in zip(tables, counts, strict=True):
            row[:count] = first + np.arange(count)
            first += count
        slots = [int(table[0]) * size + np.arange(length) for table, length in zip(tables, lengths, strict=True)]
        return tables, np.concatenate(slots).astype(np.int64)


class IgnoresSlotMapping(Wrong):
    def forward(self, batch):
        return self.real.forward(replace(batch, slot_mapping=batch.positions.astype(np.int64)))


class MixesUpRows(Wrong):
    def forward(self, batch):
        return self.real.forward(batch).roll(1, 0)


class ForgetsWhereSequencesEnd(WithScratch):
    """Its causal mask is that of one long text, as in a kernel that is not told of `query_starts`."""

    def forward(self, batch):
        right = self.real.forward(batch)
        total = len(batch.token_ids)
        if (batch.context_lens != np.diff(batch.query_starts)).any() or total > SCRATCH * self.info.block_size:
            return right
        tables, slots = self.scratch([total])
        ends = np.array([0, total], np.int32)
        return self.real.forward(
            replace(batch, query_starts=ends, context_lens=ends[1:], block_tables=tables, slot_mapping=slots)
        )


class ForgetsEarlierChunks(WithScratch):
    """Attends within the call only; what it should have read lies in the cache."""

    def forward(self, batch):
        right, lengths = self.real.forward(batch), np.diff(batch.query_starts)
        if (lengths == 1).all() or lengths.sum() > 512:
            return right
        tables, slots = self.scratch(lengths.tolist())
        return self.real.forward(replace(batch, context_lens=lengths, block_tables=tables, slot_mapping=slots))


class ReadsBlocksAsIfInARow(Wrong):
    def forward(self, batch):
        tables = (batch.block_tables[:, :1] + np.arange(batch.block_tables.shape[1], dtype=np.int32)) % 32
        return self.real.forward(replace(batch, block_tables=tables.astype(np.int32)))


class ReadsToTheEndOfItsBlocks(Wrong):
    """Takes for its context all that its blocks hold, what others have left there too."""

    def forward(self, batch):
        whole = -(-batch.context_lens // self.info.block_size) * self.info.block_size
        return self.real.forward(replace(batch, context_lens=whole.astype(np.int32)))


class DecodesOnePositionLate(Wrong):
    def forward(self, batch):
        decodes = per_token(batch, (np.diff(batch.query_starts) == 1) & (batch.context_lens > 1))
        return self.real.forward(replace(batch, positions=batch.positions + decodes.astype(np.int32)))


class LooksAtTheLastTables(Wrong):
    """Goes on with the tables of the step before, as a captured graph does whose inputs nobody updates."""

    last = None

    def forward(self, batch):
        tables, self.last = self.last, batch.block_tables
        same = tables is not None and tables.shape == self.last.shape
        return self.real.forward(replace(batch, block_tables=tables) if same else batch)


class CopiesNothing(Wrong):
    def copy(self, source, target, tokens):
        pass


class CopiesTooFewTokens(Wrong):
    def copy(self, source, target, tokens):
        self.real.copy(source, target, tokens - 1)


class SharesWhatItShouldCopy(Wrong):
    """Lets the copy be the same block, as a table of rows might."""

    def __init__(self, context):
        super().__init__(context)
        self.where = np.arange(self.info.num_blocks, dtype=np.int64)

    def copy(self, source, target, tokens):
        self.where[target] = self.where[source]

    def forward(self, batch):
        size = self.info.block_size
        blocks, within = np.divmod(batch.slot_mapping, size)
        tables = np.where(batch.block_tables >= 0, self.where[batch.block_tables], -1).astype(np.int32)
        return self.real.forward(replace(batch, block_tables=tables, slot_mapping=self.where[blocks] * size + within))


class FreesItsNeighbour(Wrong):
    def __init__(self, context):
        super().__init__(context)
        self.info = replace(self.info, capabilities=frozenset({"copy", "free"}))

    def free(self, blocks):
        for pool in self.real.pools:
            for block in range(self.info.num_blocks):
                if block not in blocks:
                    pool[block * self.info.block_size] = 0.0


class ReturnsOneBufferAlways(Wrong):
    def __init__(self, context):
        super().__init__(context)
        self.buffer = torch.empty(context.limits.logits_rows, self.info.vocab_size)

    def forward(self, batch):
        logits = self.real.forward(batch)
        self.buffer[: len(logits)] = logits
        return self.buffer[: len(logits)]


class ReturnsBfloat16(Wrong):
    def forward(self, batch):
        return self.real.forward(batch).bfloat16()


class ReturnsOneColumnMore(Wrong):
    def forward(self, batch):
        return torch.nn.functional.pad(self.real.forward(batch), (0, 1))


class ReturnsARowForEachToken(Wrong):
    def forward(self, batch):
        return self.real.forward(replace(batch, sample_at=np.arange(len(batch.token_ids), dtype=np.int32)))


class NeedsARow(Wrong):
    def forward(self, batch):
        assert batch.sample_at.max() < len(batch.token_ids)
        return self.real.forward(batch)


class ReturnsNan(Wrong):
    def forward(self, batch):
        logits = self.real.forward(batch)
        logits[-1:, 7] = torch.nan
        return logits


class ReturnsTheLastRows(Wrong):
    def forward(self, batch):
        every = np.arange(len(batch.token_ids), dtype=np.int32)
        return self.real.forward(replace(batch, sample_at=every))[len(every) - len(batch.sample_at) :]


class ChangesTheBatch(Wrong):
    def forward(self, batch):
        logits = self.real.forward(batch)
        batch.block_tables[batch.block_tables < 0] = 0
        batch.positions += 1
        return logits


class ClaimsMoreBlocksThanItHas(Wrong):
    def __init__(self, context):
        super().__init__(context)
        self.there = self.info.num_blocks
        self.info = replace(self.info, num_blocks=2 * self.there, kv_tokens=2 * self.info.kv_tokens)

    def forward(self, batch):
        tables = np.where(batch.block_tables >= 0, batch.block_tables % self.there, -1).astype(np.int32)
        slots = batch.slot_mapping % (self.there * self.info.block_size)
        return self.real.forward(replace(batch, block_tables=tables, slot_mapping=slots))


class HoldsHalfAStep(Wrong):
    def forward(self, batch):
        assert len(batch.token_ids) <= self.context.limits.max_num_batched_tokens // 2, "the buffer is full"
        return self.real.forward(batch)


class BelongsToOneThread(Wrong):
    def __init__(self, context):
        super().__init__(context)
        self.owner = threading.get_ident()

    def forward(self, batch):
        if threading.get_ident() != self.owner:
            raise RuntimeError("made in another thread")
        return self.real.forward(batch)


class IsOneForAll(Wrong):
    """Whoever makes a second one gets the first one's cache."""

    pools = None

    def __init__(self, context):
        super().__init__(context)
        IsOneForAll.pools = self.real.pools = self.pools or self.real.pools


class MakesRoomWithoutAsking(Wrong):
    def __init__(self, context):
        super().__init__(replace(context, limits=replace(context.limits, kv_memory=64e6)))


class TakesALongerContext(Wrong):
    def __init__(self, context):
        super().__init__(replace(context, limits=replace(context.limits, max_model_len=128)))


class ScalesLogits(Wrong):
    def forward(self, batch):
        return self.real.forward(batch) * 1.01


class StaysInMemory(Wrong):
    kept = ()

    def close(self):
        StaysInMemory.kept += (self.real,)


class Declares(Wrong):
    """Declares all levels, and breaks one in the seventh digit."""

    made = 0

    def __init__(self, context):
        super().__init__(context)
        self.info = replace(self.info, levels=LEVELS)
        self.number = Declares.made = Declares.made + 1

    def forward(self, batch):
        return self.real.forward(batch) * (1 + 1e-6 * self.noise(batch))


class BreaksRerun(Declares):
    def noise(self, batch):
        return self.number


class BreaksBatch(Declares):
    def noise(self, batch):
        return len(batch.context_lens)


class BreaksChunk(Declares):
    def noise(self, batch):
        return int(np.diff(batch.query_starts).max())


class BreaksPreempt(Declares):
    """What is computed in one piece is not what it is token by token."""

    def noise(self, batch):
        return rows(batch, np.diff(batch.query_starts) > 1)


class BreaksCache(Declares):
    """A prompt whose beginning is there already is not what it is as a whole."""

    def noise(self, batch):
        lengths = np.diff(batch.query_starts)
        return rows(batch, (lengths > 1) & (batch.context_lens > lengths))


def per_token(batch, values):
    """What is told of sequences [S], told of their tokens [T]."""
    return np.repeat(values, np.diff(batch.query_starts))


def rows(batch, values):
    """What is told of sequences [S], told of the rows of logits [K, 1]."""
    return torch.from_numpy(per_token(batch, values)[batch.sample_at])[:, None]


CAUGHT_BY = {
    IgnoresSlotMapping: "test_blocks::test_blocks_may_lie_in_any_order",
    ReadsBlocksAsIfInARow: "test_blocks::test_blocks_may_lie_in_any_order",
    ClaimsMoreBlocksThanItHas: "test_blocks::test_all_blocks_can_be_used",
    ReadsToTheEndOfItsBlocks: "test_blocks::test_a_block_can_be_taken_by_another_sequence",
    CopiesNothing: "test_blocks::test_a_copied_block_is_like_its_source",
    CopiesTooFewTokens: "test_blocks::test_a_copied_block_is_like_its_source",
    SharesWhatItShouldCopy: "test_blocks::test_a_copied_block_leads_a_life_of_its_own",
    FreesItsNeighbour: "test_blocks::test_freed_blocks_harm_no_other",
    MixesUpRows: "test_sequences::test_sequences_of_any_length_share_a_step",
    ForgetsWhereSequencesEnd: "test_sequences::test_sequences_of_any_length_share_a_step",
    ForgetsEarlierChunks: "test_sequences::test_a_prompt_may_be_cut_anywhere",
    DecodesOnePositionLate: "test_sequences::test_decoding_continues_the_prompt",
    LooksAtTheLastTables: "test_sequences::test_their_order_in_a_step_may_change",
    ScalesLogits: "test_sequences::test_logits_are_those_of_eager",
    ReturnsBfloat16: "test_contract::test_logits_are_float32_rows_of_the_vocabulary",
    ReturnsOneColumnMore: "test_contract::test_logits_are_float32_rows_of_the_vocabulary",
    ReturnsARowForEachToken: "test_contract::test_logits_belong_to_the_tokens_of_sample_at",
    ReturnsTheLastRows: "test_contract::test_logits_belong_to_the_tokens_of_sample_at",
    NeedsARow: "test_contract::test_a_step_may_want_no_logits",
    ReturnsNan: "test_contract::test_logits_are_numbers",
    ReturnsOneBufferAlways: "test_contract::test_rows_that_were_returned_stay_as_they_are",
    ChangesTheBatch: "test_contract::test_the_batch_is_left_as_it_is",
    HoldsHalfAStep: "test_contract::test_the_largest_step_that_the_limits_allow",
    BelongsToOneThread: "test_contract::test_it_steps_in_another_thread_than_it_was_made_in",
    TakesNamesForTokens: "test_contract::test_tokens_that_only_the_device_knows_are_taken",
    IsOneForAll: "test_contract::test_two_runners_do_not_disturb_each_other",
    TakesALongerContext: "test_contract::test_a_checkpoints_context_is_no_longer_than_asked_for",
    MakesRoomWithoutAsking: "test_refusals::test_too_little_memory_is_refused",
    StaysInMemory: "test_memory::test_memory_is_given_back_on_close",
    BreaksRerun: "test_levels::test_level_rerun",
    BreaksBatch: "test_levels::test_level_batch",
    BreaksChunk: "test_levels::test_level_chunk",
    BreaksPreempt: "test_levels::test_level_preempt",
    BreaksCache: "test_levels::test_level_cache",
}
