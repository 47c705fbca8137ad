"""Lays a step's tokens end to end, as runners take them."""

__all__ = ["make_batch"]

from itertools import chain

import numpy as np

from xinfer.engine.types import Batch, Sequence


def make_batch(sequences: list[Sequence], counts: list[int], wanted: list[int], block_size: int) -> Batch:
    """Return a batch of each sequence's next `counts[i]` tokens and its draft, with logits for the last `wanted[i]`."""
    if sequences and max(counts) == 1 == min(wanted) and not any(sequence.draft for sequence in sequences):
        return _one_each(sequences, block_size)
    tokens: list[int] = []
    lengths: list[int] = []
    for sequence, count in zip(sequences, counts, strict=True):
        first = sequence.num_computed
        tokens += sequence.token_ids[first : first + count]
        if sequence.draft:
            tokens += sequence.draft
        lengths.append(count + len(sequence.draft))
    length = np.array(lengths, np.int32)
    start = np.array([s.num_computed for s in sequences], np.int32)
    ends = np.cumsum(length, dtype=np.int32)
    owner = np.repeat(np.arange(len(sequences)), length)
    positions = np.arange(len(tokens), dtype=np.int32) + (start - (ends - length))[owner]
    tables = _tables([s.blocks for s in sequences])
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    rows = np.array(wanted, np.int32)
    within = np.arange(int(rows.sum()), dtype=np.int32) - np.repeat(np.cumsum(rows, dtype=np.int32) - rows, rows)
    return Batch(
        token_ids=np.array(tokens, np.int32),
        positions=positions.astype(np.int32, copy=False),
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=start + length,
        block_tables=tables,
        slot_mapping=slots,
        sample_at=np.repeat(ends - rows, rows) + within,
        adapters=np.zeros(len(sequences), np.int32),
    )


def _one_each(sequences: list[Sequence], block_size: int) -> Batch:
    """Return the batch of a step that brings each sequence its next token: the same, in a third of the time."""
    places = np.arange(len(sequences) + 1, dtype=np.int32)
    start = np.array([s.num_computed for s in sequences], np.int32)
    tables = _tables([s.blocks for s in sequences])
    slots = tables[places[:-1], start // block_size].astype(np.int64) * block_size + start % block_size
    return Batch(
        token_ids=np.array([s.token_ids[s.num_computed] for s in sequences], np.int32),
        positions=start,
        query_starts=places,
        context_lens=start + 1,
        block_tables=tables,
        slot_mapping=slots,
        sample_at=places[:-1],
        adapters=np.zeros(len(sequences), np.int32),
    )


def _tables(blocks: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return [S, M], each sequence's blocks and then -1."""
    if len({len(each) for each in blocks}) == 1:
        return np.array(blocks, np.int32)
    held = np.array([len(b) for b in blocks], np.int32)
    tables = np.full((len(blocks), int(held.max(initial=0))), -1, np.int32)
    tables[np.arange(tables.shape[1]) < held[:, None]] = np.fromiter(chain.from_iterable(blocks), np.int32, held.sum())
    return tables
