"""How far queries reach, and how many rows make rows alike: found out, and found out right."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.backends.torch.invariant import Padding, Part, find_padding, reach, repeat_last

CPU, FP32 = torch.device("cpu"), torch.float32


def test_a_reach_covers_its_position_and_little_more() -> None:
    positions = np.arange(1 << 17)
    far = reach(positions)
    assert (far > positions).all()
    assert (far % 64 == 0).all()
    assert (far - positions <= np.maximum(64, (positions + 1) / 8)).all()
    assert (np.diff(far) >= 0).all()


def test_positions_that_reach_equally_far_do_so_whoever_is_asked_with_them() -> None:
    positions = np.random.default_rng(0).integers(0, 10_000, 500)
    assert reach(positions).tolist() == [int(reach(np.array([p]))[0]) for p in positions]


@given(st.builds(Padding, st.integers(1, 9), st.sampled_from([1, 2, 4, 8])), st.integers(1, 100))
def test_padding_adds_rows_and_never_more_than_it_must(padding: Padding, count: int) -> None:
    rows = padding.rows(count)
    assert rows >= count
    assert rows >= padding.least
    assert rows % padding.multiple == 0 or rows == padding.least
    assert rows - count < max(padding.multiple, padding.least)
    repeated = repeat_last(np.arange(count), padding)
    assert repeated.tolist() == [*range(count), *[count - 1] * (rows - count)]


def fussy(differs):
    """A part whose rows come out differently where this says so of their number."""

    def compute(x):
        return x * (1 + 1e-6 * differs(len(x)))

    return Part("fussy", 8, compute)


@pytest.mark.parametrize(
    ("differs", "padding"),
    [
        (lambda count: False, Padding(2)),
        (lambda count: count == 1, Padding(2)),
        (lambda count: count % 2, Padding(2, 2)),
        (lambda count: count % 4 > 0, Padding(4, 4)),
        (lambda count: count == 3, Padding(2, 2)),
        (lambda count: count < 16, Padding(16, 16)),
        (lambda count: count, None),
    ],
    ids=["never", "one", "odd", "fours", "three", "few", "all"],
)
def test_the_least_padding_is_found_that_makes_rows_alike(differs, padding: Padding | None) -> None:
    assert find_padding([(fussy(differs), 128), (fussy(lambda count: False), 64)], FP32, CPU) == padding


def test_every_row_is_looked_at() -> None:
    def compute(x):
        out = x.clone()
        if len(x) == 7:
            out[6, 3] += 1e-6
        return out

    assert find_padding([(Part("last row of seven", 8, compute), 128)], FP32, CPU) == Padding(2, 2)


def test_finding_out_leaves_the_programs_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    find_padding([(fussy(lambda count: count == 1), 64)], FP32, CPU)
    assert torch.equal(torch.rand(4), expected)
