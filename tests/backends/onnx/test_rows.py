"""Rows of the cache: what was written into a block is found in it, wherever its row goes, with the fewest swaps."""

import sys
from itertools import combinations

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from xinfer.backends.onnx.rows import Rows, window


def outside(rows: set[int], first: int) -> int:
    """How many of these rows do not lie in the range of their number that begins here."""
    return len(rows - set(range(first, first + len(rows))))


def least_outside(rows: set[int], count: int) -> int:
    return min(outside(rows, first) for first in range(count - len(rows) + 1))


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))), st.data()
)
def test_a_window_holds_as_many_rows_as_any(rows: tuple[int, set[int]], data: st.DataObject) -> None:
    count, wanted = rows
    order = data.draw(st.permutations(sorted(wanted)))
    first = window(np.array(order), count)
    assert 0 <= first <= count - len(wanted)
    assert outside(wanted, first) == least_outside(wanted, count)


def swaps_needed(rows: set[int], count: int) -> int:
    """How many rows must change places, two at a time, until these lie side by side: found by trying everything."""
    goals = {frozenset(range(first, first + len(rows))) for first in range(count - len(rows) + 1)}
    seen = reached = {frozenset(rows)}
    steps = 0
    while not reached & goals:
        swapped = {
            frozenset({b if row == a else a if row == b else row for row in each})
            for each in reached
            for a, b in combinations(range(count), 2)
        }
        reached = swapped - seen
        seen = seen | reached
        steps += 1
    return steps


@pytest.mark.parametrize("count", range(1, 7))
def test_no_way_of_swapping_gathers_with_fewer_swaps(count: int) -> None:
    for number in range(1, count + 1):
        for wanted in combinations(range(count), number):
            rows = Rows([(1, 1)], count, 1, torch.float32)
            first = rows.gather(np.array(wanted))
            assert sorted(rows.row_of[list(wanted)]) == list(range(first, first + number))
            moved = int((rows.row_of != np.arange(count)).sum())
            assert moved == 2 * swaps_needed(set(wanted), count)
            rows.close()


def numbered(tokens: list[int], index: int, dtype: torch.dtype) -> torch.Tensor:
    """What tensor `index` holds of tokens of these numbers, in all heads and dimensions."""
    return torch.tensor(tokens, dtype=dtype)[:, None] + index


class Cache(RuleBasedStateMachine):
    """Blocks as a dictionary of what they were given, beside rows of sizes that fill no page, one, and more."""

    @initialize(
        count=st.integers(1, 9),
        slots=st.sampled_from([1, 3, 16, 128, 130]),
        dtype=st.sampled_from([torch.float32, torch.int8]),
        heads=st.sampled_from([[(1, 8)], [(2, 4), (2, 4)], [(1, 16), (3, 8), (2, 32)]]),
    )
    def begin(self, count, slots, dtype, heads):
        self.rows = Rows(heads, count, slots, dtype)
        assert [tensor.shape for tensor in self.rows.tensors] == [(count, g, slots, d) for g, d in heads]
        if dtype == torch.float32:
            for tensor in self.rows.tensors:
                tensor.fill_(torch.nan)
        self.model = {block: [] for block in range(count)}  # of each token a number, the same in all its dimensions
        self.next = 0

    def write(self, block, start, tokens):
        """As a step does: behind the first tokens of a block, perhaps over others."""
        row, values = int(self.rows.row_of[block]), [(self.next + place) % 120 for place in range(tokens)]
        self.next += tokens
        for index, tensor in enumerate(self.rows.tensors):
            tensor[row, :, start : start + tokens] = numbered(values, index, tensor.dtype)
        self.model[block][start:] = values
        self.rows.filled[block] = max(self.rows.filled[block], start + tokens)

    @rule(data=st.data())
    def step(self, data):
        """Gather some blocks and write into each, behind what it has or from an earlier place on."""
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        before = self.rows.row_of.copy()
        first = self.rows.gather(np.array(blocks, np.int32))
        assert sorted(self.rows.row_of[blocks]) == list(range(first, first + len(blocks)))
        least = least_outside(set(before[blocks].tolist()), len(self.model))
        assert int((self.rows.row_of != before).sum()) == 2 * least
        for block in blocks:
            start = data.draw(st.integers(0, len(self.model[block])))
            self.write(block, start, data.draw(st.integers(0, min(5, self.rows.slots - start))))

    @rule(data=st.data())
    def fill(self, data):
        """A long prompt, so that rows of several pages are used."""
        block = data.draw(st.sampled_from(sorted(self.model)))
        self.rows.gather(np.array([block]))
        self.write(block, 0, self.rows.slots)

    @rule(data=st.data())
    def copy(self, data):
        source = data.draw(st.sampled_from(sorted(self.model)))
        target = data.draw(st.sampled_from(sorted(self.model)))
        if source == target or not self.model[source]:
            return
        tokens = data.draw(st.integers(1, len(self.model[source])))
        self.rows.copy(source, target, tokens)
        self.model[target] = self.model[source][:tokens]

    @rule(data=st.data())
    def free(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        self.rows.free(blocks)
        for block in blocks:
            self.model[block] = []

    @invariant()
    def blocks_hold_what_they_were_given(self):
        if not hasattr(self, "rows"):
            return
        assert sorted(self.rows.row_of) == list(range(len(self.model)))
        for block, tokens in self.model.items():
            row = int(self.rows.row_of[block])
            for index, tensor in enumerate(self.rows.tensors):
                assert (tensor[row, :, : len(tokens)] == numbered(tokens, index, tensor.dtype)).all()

    def teardown(self):
        if hasattr(self, "rows"):
            self.rows.close()


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=20)


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory is given back only at the end")
def test_only_what_is_written_takes_memory_and_free_and_close_give_it_back() -> None:
    before = resident()
    rows = Rows([(4, 32)] * 8, 256, 4096, torch.float32)  # 4 GiB
    assert resident() - before < 20e6
    blocks = list(range(16))
    rows.gather(np.array(blocks[::-1]))
    for block in blocks:  # 8 MB each
        for tensor in rows.tensors:
            tensor[int(rows.row_of[block]), :, :2048] = 1
        rows.filled[block] = 2048
    written = resident()
    assert written - before > 120e6
    rows.free(blocks[::2])
    assert 50e6 < written - resident() < 90e6
    assert all((tensor[int(rows.row_of[1]), :, :2048] == 1).all() for tensor in rows.tensors)
    rows.close()
    assert resident() - before < 20e6
