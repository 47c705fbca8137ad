"""A step's arrays, against what `Batch` says of them, token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xinfer.engine.batch import make_batch
from xinfer.engine.types import Request, SamplingParams, Sequence


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Sequence], list[int], list[int], int]:
    """Sequences anywhere in their texts, in blocks of any order; often all of them with one token that is sampled."""
    size, decodes = draw(st.integers(1, 5)), draw(st.booleans())
    blocks = draw(st.permutations(range(60)))
    sequences, counts, wanted = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        known = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
        count = 1 if decodes else draw(st.integers(1, len(known)))
        sequence = Sequence(Request("r", 0, tuple(known), SamplingParams(), 0), list(known), limit=99)
        sequence.num_computed = draw(st.integers(0, len(known) - count))
        sequence.draft = [] if decodes else draw(st.lists(st.integers(0, 99), max_size=3))
        needed = -(-(sequence.num_computed + count + len(sequence.draft)) // size)
        sequence.blocks, blocks = blocks[: needed + draw(st.integers(0, 1))], blocks[needed + 1 :]
        sequences.append(sequence)
        counts.append(count)
        wanted.append(1 if decodes else draw(st.integers(0, count + len(sequence.draft))))
    return sequences, counts, wanted, size


@given(steps())
def test_every_token_is_where_it_belongs(step: tuple[list[Sequence], list[int], list[int], int]) -> None:
    sequences, counts, wanted, size = step
    batch = make_batch(sequences, counts, wanted, size)
    tokens, positions, slots, starts, sampled = [], [], [], [0], []
    for sequence, count, rows in zip(sequences, counts, wanted, strict=True):
        new = sequence.token_ids[sequence.num_computed :][:count] + sequence.draft
        for place, token in enumerate(new, sequence.num_computed):
            tokens.append(token)
            positions.append(place)
            slots.append(sequence.blocks[place // size] * size + place % size)
        starts.append(len(tokens))
        sampled += range(len(tokens) - rows, len(tokens))
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_starts.tolist() == starts
    assert batch.sample_at.tolist() == sampled
    ends = [s.num_computed + c + len(s.draft) for s, c in zip(sequences, counts, strict=True)]
    assert batch.context_lens.tolist() == ends
    longest = max(len(s.blocks) for s in sequences)
    assert batch.block_tables.tolist() == [s.blocks + [-1] * (longest - len(s.blocks)) for s in sequences]
    assert batch.adapters.tolist() == [0] * len(sequences)
    for name, dtype in (("slot_mapping", np.int64), ("positions", np.int32), ("sample_at", np.int32)):
        assert getattr(batch, name).dtype == dtype
    assert all(getattr(batch, name).dtype == np.int32 for name in ("token_ids", "query_starts", "context_lens"))
    assert batch.block_tables.dtype == batch.adapters.dtype == np.int32
