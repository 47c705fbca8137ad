"""Random numbers are Random123's Philox4x32-10, and depend on nothing but seed, position, index and stream."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinfer.engine.random import MAX_SEED, derive, fresh_seed, philox, uniform

words = st.integers(0, 2**32 - 1)
seeds = st.integers(0, MAX_SEED)


def reference(key, counter):
    """Philox4x32-10 as the paper states it, in plain integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def arrays(*columns):
    return tuple(np.array(column, np.uint64) for column in columns)


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def assert_even(draws, bins=64):
    """The draws fill the bins as evenly as chance would: within six standard deviations of chi-square's mean."""
    counts = np.bincount((draws * bins).astype(int), minlength=bins)
    free = bins - 1
    assert abs(chi_square(counts, len(draws) / bins) - free) < 6 * (2 * free) ** 0.5


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(key, counter, expected):
    result = philox(arrays(*([k] for k in key)), arrays(*([c] for c in counter)))
    assert " ".join(f"{int(word[0]):08x}" for word in result) == expected


@given(st.lists(st.tuples(words, words, words, words, words, words), min_size=1, max_size=5))
def test_rows_equal_the_paper_in_plain_integers(rows):
    k0, k1, c0, c1, c2, c3 = zip(*rows, strict=True)
    result = zip(*philox(arrays(k0, k1), arrays(c0, c1, c2, c3)), strict=True)
    assert [tuple(map(int, row)) for row in result] == [reference(row[:2], row[2:]) for row in rows]


@given(st.lists(st.tuples(seeds, words, words), min_size=1, max_size=5))
def test_a_draw_is_53_bits_of_its_seed_position_and_index(rows):
    draws = uniform(*(list(column) for column in zip(*rows, strict=True)))
    for draw, (seed, position, index) in zip(draws, rows, strict=True):
        word0, word1, _, _ = reference((seed % 2**32, seed >> 32), (position, index, 0, 0))
        assert draw == (word0 * 2**32 + word1 >> 11) / 2**53
        assert 0 <= draw < 1


@given(seeds, st.integers(1, 2**32 - 1))
def test_a_request_has_the_64_bits_of_its_own_stream_as_seed(run, index):
    word0, word1, _, _ = reference((run % 2**32, run >> 32), (index, 0, 1, 0))
    assert derive(run, index) == word0 * 2**32 + word1


@pytest.mark.parametrize("run", [0, 1, 7, 2**63, MAX_SEED])
def test_request_zero_has_the_seed_of_its_run(run):
    assert derive(run, 0) == run


def test_requests_of_all_runs_have_seeds_of_their_own():
    derived = [derive(run, index) for run in (0, 1, 2**32, MAX_SEED) for index in range(2000)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed <= MAX_SEED for seed in derived)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32, 2**63, MAX_SEED])
def test_positions_of_one_seed_draw_evenly(seed):
    draws = uniform([seed] * 65536, list(range(65536)))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert_even(draws)


def test_seeds_draw_evenly_at_one_position():
    assert_even(uniform(list(range(65536)), [3] * 65536))
    assert_even(uniform([derive(5, index) for index in range(4096)], [3] * 4096))


def test_samples_of_one_position_draw_evenly():
    assert_even(uniform([9] * 65536, [3] * 65536, list(range(65536))))


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbouring_positions_and_seeds_know_nothing_of_each_other(lag):
    draws = uniform([11] * 65536, list(range(65536)))
    assert_even((draws[:-lag] - draws[lag:]) % 1)
    others = uniform([11 + lag] * 65536, list(range(65536)))
    assert_even((draws - others) % 1)


def test_every_one_of_the_53_bits_is_random():
    bits = (uniform([1] * 4096, list(range(4096))) * 2**53).astype(np.uint64)
    shares = ((bits[:, None] >> np.arange(53, dtype=np.uint64)) & np.uint64(1)).mean(0)
    assert (abs(shares - 0.5) < 6 * 0.5 / 4096**0.5).all()


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_the_ends_of_the_seed_range_are_seeds_like_any_other(seed):
    near = [uniform([s], [5])[0] for s in (seed, seed ^ 1, seed ^ 2**63)]
    assert len(set(near)) == 3


def test_a_draw_does_not_depend_on_the_draws_beside_it():
    many = uniform(list(range(100)), list(range(100, 200)), list(range(200, 300)))
    assert many.tolist() == [uniform([i], [100 + i], [200 + i])[0] for i in range(100)]


def test_without_an_index_it_is_sample_zero():
    assert uniform([5, 6], [7, 8]).tolist() == uniform([5, 6], [7, 8], [0, 0]).tolist()


def test_a_fresh_seed_is_short_and_new():
    fresh = [fresh_seed() for _ in range(20)]
    assert all(0 <= seed < 2**32 for seed in fresh)
    assert len(set(fresh)) == 20
