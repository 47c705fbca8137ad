"""A token is what sorting the whole vocabulary and adding up fractions gives, whoever shares the batch."""

import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from xinfer.engine.filters import Candidates, candidates, largest_by_key
from xinfer.engine.random import uniform
from xinfer.engine.sampler import pick, sample
from xinfer.engine.types import Request, SamplingParams, Sequence
from xinfer.errors import RequestError

thorough = settings(max_examples=250)

INF, NAN = math.inf, math.nan
HALVING = 1 / math.log(2)  # at this temperature a logit less by one halves the weight, exactly


def sequence(position=3, seed=0, **params):
    """A sequence whose next token has this position."""
    tokens = (1,) * position
    return Sequence(Request("0", 0, tokens, SamplingParams(**params), seed), list(tokens), position + 1)


def draw(rows, *sequences):
    return sample(torch.tensor(rows, dtype=torch.float32), sequences)


def weights_of(row, temperature):
    """Each token's weight, 1 for the likeliest, as a fraction: exact where the temperature halves."""
    top = max(row)
    if temperature == HALVING and all(x == -INF or x == int(x) for x in row):
        return [Fraction(0) if x == -INF else Fraction(2) ** int(x - top) for x in row]
    return [Fraction(math.exp((x - top) / temperature)) for x in row]


def clear(distance, weights):
    """Whether a comparison is not left to rounding: it is far from equal, or all of it is exact in floating point."""
    exact = all(weight.denominator <= 2**20 for weight in weights)
    return exact or abs(distance) > Fraction(1, 10**12) * sum(weights)


def filtered(row, params):
    """The tokens that may be drawn, with their weights, by the definition of each filter."""
    weights = weights_of(row, params.temperature)
    kept = sorted(range(len(row)), key=lambda token: (-row[token], token))
    assume(all(clear(weights[t] - Fraction(params.min_p), weights) for t in kept))
    kept = [t for t in kept if weights[t] >= Fraction(params.min_p)]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        wanted = Fraction(params.top_p) * sum(weights[t] for t in kept)
        reached = list(accumulate(weights[t] for t in kept))
        assume(all(clear(mass - wanted, [*weights, wanted]) for mass in reached))
        kept = kept[: 1 + sum(mass < wanted for mass in reached)]
    return {t: weights[t] for t in sorted(kept) if weights[t] > 0}


def drawn(kept, u):
    """The first token at which the cumulative weight exceeds u times the whole."""
    target = Fraction(float(u)) * sum(kept.values())
    sums = list(accumulate(kept.values()))
    assume(all(clear(mass - target, [*kept.values(), target]) for mass in sums))
    return next(token for token, mass in zip(kept, sums, strict=True) if mass > target)


def expected(row, s):
    params = s.request.params
    if params.temperature == 0 or params.top_k == 1:
        return row.index(max(row))
    return drawn(filtered(row, params), uniform([s.request.seed], [len(s.token_ids)])[0])


few = st.sampled_from([-INF, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0])  # few different logits, so that ties are the rule
real = st.floats(-20, 20, width=32) | few


@st.composite
def batches(draw_from):
    """Rows of one width, each with parameters and a seed of its own."""
    width = draw_from(st.integers(1, 12))
    logit = draw_from(st.sampled_from([few, real]))
    row = st.lists(logit, min_size=width, max_size=width).filter(lambda values: max(values) > -INF)
    params = st.fixed_dictionaries(
        {
            "position": st.integers(1, 40),
            "seed": st.integers(0, 2**64 - 1),
            "temperature": st.sampled_from([HALVING, HALVING, 0.0, 0.5, 0.7, 1.0, 2.0, 1e-3]),
            "top_k": st.sampled_from([0, -1, 1, 2, 3, 5, width, 10**9]),
            "top_p": st.sampled_from([1.0, 0.0, 0.25, 0.5, 0.75, 0.9]),
            "min_p": st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
        }
    )
    pairs = draw_from(st.lists(st.tuples(row, params), min_size=1, max_size=5))
    return [row for row, _ in pairs], [sequence(**chosen) for _, chosen in pairs]


@thorough
@given(batches())
def test_each_row_of_a_mixed_batch_gets_the_token_of_the_definition(batch):
    rows, sequences = batch
    assert draw(rows, *sequences) == [expected(row, s) for row, s in zip(rows, sequences, strict=True)]


@thorough
@given(batches())
def test_a_row_gets_the_same_token_whoever_shares_the_batch(batch):
    rows, sequences = batch
    together = draw(rows, *sequences)
    assert together == [draw([row], s)[0] for row, s in zip(rows, sequences, strict=True)]
    assert together[::-1] == draw(rows[::-1], *sequences[::-1])


@thorough
@given(batches())
def test_candidates_are_those_that_the_filters_leave(batch):
    rows, sequences = batch
    for row, s in zip(rows, sequences, strict=True):
        params = s.request.params
        assume(not params.greedy)
        kept = keep(row, params.temperature, params.top_k, params.top_p, params.min_p)
        reference = filtered(row, params)
        assert kept == pytest.approx({token: float(weight) for token, weight in reference.items()}, rel=1e-12)
        assert list(kept) == sorted(kept)


def keep(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The candidates of one row, with their weights."""
    result = candidates(
        torch.tensor([row], dtype=torch.float32),
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([top_k]) if 0 < top_k < len(row) else None,
        torch.tensor([top_p], dtype=torch.float64) if top_p < 1 else None,
        torch.tensor([min_p], dtype=torch.float64) if min_p > 0 else None,
    )
    ids = torch.arange(len(row)) if result.ids is None else result.ids[0]
    return {token: w for token, w in zip(ids.tolist(), result.weights[0].tolist(), strict=True) if w > 0}


@pytest.mark.parametrize("top_k", [2, 7, 100, 999])
def test_of_many_equals_the_lowest_ids_stay(top_k):
    row = [float(x) for x in np.random.default_rng(top_k).integers(0, 4, 1000)]
    order = sorted(range(1000), key=lambda token: (-row[token], token))
    assert list(keep(row, top_k=top_k)) == sorted(order[:top_k])


def test_rows_with_different_top_k_share_a_batch_with_equals_at_the_border():
    rows = torch.tensor(np.random.default_rng(0).integers(0, 5, (6, 50)), dtype=torch.float32)
    top_k = torch.tensor([1, 2, 5, 20, 30, 49])
    result = candidates(rows, torch.ones(6, dtype=torch.float64), top_k, None, None)
    for row, ids, weights, k in zip(rows.tolist(), result.ids, result.weights, top_k.tolist(), strict=True):
        order = sorted(range(50), key=lambda token: (-row[token], token))
        assert ids[weights > 0].tolist() == sorted(order[:k])


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 59))
def test_a_device_finds_the_same_largest_logits_by_one_key(seed, width, count):
    """With equals, both zeros, both signs, infinities and subnormal numbers among them."""
    values = np.array([0.0, -0.0, 1.5, -1.5, -np.inf, 1e-45, -1e-45, 3e38, -3e38, 1.5000001], np.float32)
    rows = torch.from_numpy(np.random.default_rng(seed).choice(values, (3, width)))
    count = min(count, width)
    found, ids = largest_by_key(rows, count)
    order = [sorted(range(width), key=lambda token: (-row[token], token))[:count] for row in rows.tolist()]
    assert ids.tolist() == order
    assert torch.equal(found, rows.gather(1, torch.tensor(order)))


@pytest.mark.parametrize(("p", "ids"), [(0, [0]), (0.5, [0]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1, [0, 1, 2, 3])])
def test_the_nucleus_is_the_smallest_set_whose_mass_reaches_p(p, ids):
    """Case S04, with powers of two, so that rounding can't decide."""
    assert list(keep([0.0, -1.0, -2.0, -2.0], HALVING, top_p=p)) == ids


@pytest.mark.parametrize("tail", [0, 1, 900, 1020, 1100, 9000])
@pytest.mark.parametrize("p", [0.5, 0.9, 0.999])
def test_a_nucleus_may_be_wider_than_what_is_sorted_at_first(p, tail):
    rng = np.random.default_rng(tail)
    rows = torch.tensor(rng.normal(size=(3, 64 + tail)) * np.array([[0.01], [3.0], [30.0]]), dtype=torch.float32)
    result = candidates(rows, torch.ones(3, dtype=torch.float64), None, torch.full((3,), p, dtype=torch.float64), None)
    for row, ids, weights in zip(rows.double().tolist(), result.ids, result.weights, strict=True):
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        shares = np.exp(np.array([row[token] for token in order]) - row[order[0]])
        needed = 1 + int((shares.cumsum()[:-1] < p * shares.sum()).sum())
        assert ids[weights > 0].tolist() == sorted(order[:needed])


def test_the_nucleus_of_three_tenths_and_five_tenths():
    logits = [math.log(share) for share in (0.3, 0.1, 0.1, 0.5)]
    assert list(keep(logits, top_p=0.79)) == [0, 3]
    assert list(keep(logits, top_p=0.81)) == [0, 1, 3]


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.499, 0), (0.5, 1), (0.749, 1), (0.75, 3), (0.874, 3), (0.875, 4), (1 - 2**-53, 4)]
)
def test_the_first_token_whose_cdf_exceeds_u_is_picked(u, token):
    kept = Candidates(None, torch.tensor([[0.5, 0.25, 0.0, 0.125, 0.125, 0.0]], dtype=torch.float64))
    assert pick(kept, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


@thorough
@given(st.lists(st.floats(1e-300, 1), min_size=1, max_size=40), st.integers(0, 5))
def test_even_the_largest_u_picks_a_token_that_can_be_drawn(weights, zeros):
    kept = Candidates(None, torch.tensor([weights + [0.0] * zeros], dtype=torch.float64))
    assert pick(kept, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() < len(weights)


# S01, S02, S05: temperatures near zero, greedy in three ways, top-k off and beyond the vocabulary


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy_and_finite(temperature):
    row = [2.875, 2.9551, 11.0625]
    assert list(keep(row, temperature)) == [2]
    assert draw([row] * 20, *(sequence(n, temperature=temperature) for n in range(20))) == [2] * 20


@pytest.mark.parametrize("temperature", [1e6, 1e308])
def test_a_very_high_temperature_makes_all_finite_logits_equally_likely(temperature):
    assert keep([-20.0, 20.0, -INF], temperature) == pytest.approx({0: 1, 1: 1}, rel=1e-4)


@thorough
@given(st.lists(few, min_size=1, max_size=12).filter(lambda row: max(row) > -INF), st.integers(0, 2**64 - 1))
def test_temperature_zero_is_argmax_whatever_seed_and_filters_say(row, seed):
    ways = [
        {"temperature": 0},
        {"temperature": 1, "top_k": 1},
        {"temperature": 0, "top_p": 0.1, "top_k": 5, "min_p": 0.3},
    ]
    first = min(token for token, logit in enumerate(row) if logit == max(row))
    assert draw([row] * 3, *(sequence(seed=seed, **way) for way in ways)) == [first] * 3


@pytest.mark.parametrize("top_k", [0, -1, 10, 9999999, 10**30])
def test_top_k_off_or_beyond_the_vocabulary_keeps_every_token(top_k):
    row = [0.0] * 10
    tokens = draw([row] * 400, *(sequence(n % 40, seed=n, top_k=top_k) for n in range(400)))
    assert tokens == draw([row] * 400, *(sequence(n % 40, seed=n) for n in range(400)))
    assert set(tokens) == set(range(10))


# S13: rows that are not finite


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"top_k": 2},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "bad",
    [[NAN] * 4, [1.0, NAN, 0.0, 2.0], [0.0, INF, 1.0, 2.0], [NAN, INF, 0.0, 0.0], [-INF] * 4, [-INF, NAN, -INF, -INF]],
    ids=str,
)
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_have_theirs(params, bad):
    good = [[0.0, 1.0, 2.0, 3.0], [3.0, -INF, 2.0, 2.0]]
    rows = [good[0], bad, good[1], bad]
    tokens = draw(rows, *(sequence(5, seed=n, **params) for n in range(4)))
    assert tokens[1] is None
    assert tokens[3] is None
    assert tokens[0] == draw([good[0]], sequence(5, seed=0, **params))[0]
    assert tokens[2] == draw([good[1]], sequence(5, seed=2, **params))[0]


def test_a_single_possible_token_is_drawn():
    assert draw([[-INF, -INF, 0.0]] * 2, sequence(top_p=0.5), sequence(top_k=2)) == [2, 2]


def test_without_rows_there_are_no_tokens():
    assert sample(torch.empty(0, 5), []) == []


# D02 and the distribution


@pytest.mark.parametrize("mate", [{"temperature": 0}, {"seed": 7}, {"seed": 42}, {"top_k": 2, "seed": 7}], ids=str)
@pytest.mark.parametrize("place", [0, 1])
def test_a_seeded_request_does_not_depend_on_its_batch_mate(mate, place):
    rng = np.random.default_rng(3)
    for position in range(16):
        mine, other = rng.normal(size=(2, 30)).tolist()
        batch = [(mine, sequence(position, seed=42, temperature=0.8)), (other, sequence(position, **mate))]
        rows, sequences = zip(*(batch if place == 0 else batch[::-1]), strict=True)
        assert draw(rows, *sequences)[place] == draw([mine], sequence(position, seed=42, temperature=0.8))[0]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8}],
    ids=str,
)
def test_tokens_are_as_frequent_as_the_filtered_softmax_says(params):
    row = [0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 0.3, -2.0]
    row = torch.tensor(row, dtype=torch.float32).tolist()
    count = 20000
    sequences = [sequence(1 + n % 100, seed=n // 100, **params) for n in range(count)]
    tokens = sample(torch.tensor([row]).expand(count, -1), sequences)
    kept = filtered(row, SamplingParams(**params))
    total = sum(kept.values())
    counts = np.bincount(tokens, minlength=len(row))
    assert set(np.flatnonzero(counts)) == set(kept)
    wanted = np.array([float(weight / total) * count for weight in kept.values()])
    free = len(kept) - 1
    assert ((counts[list(kept)] - wanted) ** 2 / wanted).sum() < free + 6 * (2 * free) ** 0.5


# SamplingParams: D01 and every other range


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", value) for value in (-1, 2**64, "42", 1.5, True, NAN)),
        *(("temperature", value) for value in (-0.1, INF, NAN, "1", None, True, 10**400, 1j, np.float32(INF))),
        *(("top_p", value) for value in (-0.1, 1.1, NAN, "1", None, False)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN, "1", None, False)),
        *(("top_k", value) for value in (-2, 1.5, "1", None, True, NAN)),
        *(("max_tokens", value) for value in (-1, 1.5, "1", True)),
        *(("stop", value) for value in ("", [""], ["a", ""], [1], [None], None, 5, b"ab", {"a": 1})),
        *(("stop_token_ids", value) for value in ([-1], [1.5], ["1"], [True], [None], None, 5, "5")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name}="):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, None, np.int64(5), np.uint64(2**64 - 1)])
def test_every_seed_of_the_range_is_taken(seed):
    assert SamplingParams(seed=seed).seed == seed


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        top_p=np.float64(0.5),
        min_p=np.int32(0),
        seed=np.uint64(7),
        max_tokens=np.int32(9),
        stop_token_ids=np.array([1, 2]),
    )
    values = [params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.max_tokens]
    assert values == [0.5, 3, 0.5, 0, 7, 9]
    assert {type(value) for value in [*values, *params.stop_token_ids]} == {int, float}


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("limits", [{"temperature": 0, "top_p": 0, "min_p": 0}, {"top_p": 1, "min_p": 1, "top_k": -1}])
def test_the_ends_of_the_ranges_are_in_them(limits):
    assert draw([[0.0, 1.0, 1.0]], sequence(**limits))[0] in (1, 2)
