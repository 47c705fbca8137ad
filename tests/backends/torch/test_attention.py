"""Which keys a query sees, counted: each key's value is a one of its own, so that the output names those seen."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from xinfer.backends.torch.attention import Step, plan_gathered
from xinfer.backends.torch.choosing import Device, choose_kernel
from xinfer.backends.torch.invariant import InvariantStep, Padding, plan_invariant
from xinfer.backends.torch.paged import PagedStep, plan_paged, plan_step
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec, RopeSpec

LENGTH, BLOCK = 16, 4
CPU = torch.device("cpu")

Plan = Callable[[Batch, AttentionSpec], Step | PagedStep | InvariantStep]


def fast(batch: Batch, spec: AttentionSpec) -> Step | PagedStep:
    return plan_step(
        batch, BLOCK, CPU, {spec: choose_kernel(spec, torch.float32, torch.float32, Device.of(CPU)).kernel}
    )


def gathered_by_host(batch: Batch, spec: AttentionSpec) -> Step:
    return plan_gathered(batch, BLOCK, CPU)


def gathered_by_device(batch: Batch, spec: AttentionSpec) -> PagedStep:
    return plan_paged(batch, BLOCK, CPU, {spec: "sdpa"})


def invariant(batch: Batch, spec: AttentionSpec) -> InvariantStep:
    return plan_invariant(batch, BLOCK, Padding(), CPU)


def seen_keys(plan: Plan, chunks: Sequence[int], window: int | None, others: Sequence[int] = ()) -> list[list[int]]:
    """Return which of a sequence's 16 keys each of its queries sees, if its tokens come in these chunks.

    Queries are zero, so that all keys seen weigh the same. In each step, other sequences with one new token and a
    context of these lengths come after it. What was not written is NaN.
    """
    spec = AttentionSpec(1, 1, LENGTH, RopeSpec(LENGTH), window=window)
    blocks = np.random.default_rng(0).permutation(64).reshape(-1, 8).astype(np.int32)
    pool = torch.full((64 * BLOCK, 2 * LENGTH), torch.nan)
    for other, context in enumerate(others, 1):
        places = np.arange(context)
        pool[blocks[other][places // BLOCK].astype(int) * BLOCK + places % BLOCK] = 1.0
    found = []
    for start, end in pairwise(np.cumsum([0, *chunks]).tolist()):
        counts, contexts = [end - start, *[1 for _ in others]], [end, *others]
        places = np.concatenate([np.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)])
        owner = np.repeat(np.arange(len(counts)), counts)
        slots = blocks[owner, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
        batch = Batch(
            token_ids=np.zeros(len(places), np.int32),
            positions=places.astype(np.int32),
            query_starts=np.cumsum([0, *counts], dtype=np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=blocks[: len(counts)],
            slot_mapping=slots,
            sample_at=np.cumsum(counts, dtype=np.int32) - 1,
            adapters=np.zeros(len(counts), np.int32),
        )
        values = torch.eye(LENGTH)[torch.from_numpy(places % LENGTH)]
        kv = torch.cat([torch.ones_like(values), values], 1)
        step = plan(batch, spec)
        pool[step.slots] = kv[: len(step.slots)]
        out = step.attend(torch.zeros(len(places), 1, LENGTH), kv, pool, spec)
        assert out.isfinite().all()  # those of shorter contexts too, whose keys are padded (case N01)
        found += [keys(row) for row in out[: end - start]]
    return found


def keys(row: Tensor) -> list[int]:
    """Return the places of the ones that a row is the mean of."""
    seen = row.nonzero().flatten().tolist()
    torch.testing.assert_close(row[seen], torch.full((len(seen),), 1 / len(seen)))
    return seen


CUTS = {"prefill": [16], "decode": [1] * 16, "chunks": [5, 1, 7, 3], "chunks then decode": [6, 4, 1, 1, 1, 1, 1, 1]}


@pytest.mark.parametrize("plan", [fast, gathered_by_host, gathered_by_device, invariant])
@pytest.mark.parametrize("window", [1, 2, 4, 15, 16, 17, None])
@pytest.mark.parametrize("others", [(), (3, 9, 20)], ids=["alone", "in company"])
@pytest.mark.parametrize("chunks", CUTS.values(), ids=CUTS)
def test_a_query_sees_as_many_keys_as_the_window_is_wide_itself_included(
    plan: Plan, chunks: list[int], others: tuple[int, ...], window: int | None
) -> None:
    """Case M10: a window of 4 sees 1, 2, 3, 4, 4, 4, ... keys, and always the last ones."""
    width = window or LENGTH
    expected = [list(range(max(0, place + 1 - width), place + 1)) for place in range(LENGTH)]
    assert seen_keys(plan, chunks, window, others) == expected
