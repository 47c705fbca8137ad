"""Ratios are those of repeats, and intervals cover the true one as often as they say."""

from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinfer.records.compare_samples import _student, ratio

STATISTICS = ("mean", "p50", "p95")
TIMES = st.floats(0.01, 1e4)
BLOCKS = st.lists(st.lists(TIMES, min_size=1, max_size=6), min_size=1, max_size=5)


def values(blocks: list[list[float]], statistic: str) -> list[float]:
    if statistic == "mean":
        return [sum(block) / len(block) for block in blocks]
    return [float(np.percentile(block, int(statistic[1:]))) for block in blocks]


@given(BLOCKS, BLOCKS, st.sampled_from(STATISTICS))
def test_apart_the_ratio_is_that_of_the_middle_repeats(new, old, statistic):
    found = ratio(new, old, statistic, paired=False, resamples=50)
    here, before = (np.exp(np.median(np.log(values(side, statistic)))) for side in (new, old))
    assert (found.new, found.old) == (pytest.approx(here), pytest.approx(before))
    assert found.estimate == pytest.approx(here / before)
    assert found.repeats == min(len(new), len(old))


@given(st.lists(st.tuples(*[st.lists(TIMES, min_size=1, max_size=6)] * 2), min_size=1, max_size=7), st.data())
def test_in_turns_it_is_the_middle_one_of_the_ratios_of_neighbours(pairs, data):
    statistic = data.draw(st.sampled_from(STATISTICS))
    new, old = [one for one, _ in pairs], [other for _, other in pairs]
    found = ratio(new, old, statistic, paired=True, resamples=50)
    ratios = [a / b for a, b in zip(values(new, statistic), values(old, statistic), strict=True)]
    middle = median(ratios) if len(ratios) % 2 else np.exp(np.median(np.log(ratios)))
    assert found.estimate == pytest.approx(middle)
    if len(pairs) > 1:
        assert min(ratios) * 0.999 <= found.low <= found.high <= max(ratios) * 1.001


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 4.303), (4, 2.776), (7, 2.365), (9, 2.262), (19, 2.093), (1000, 1.962)]
)
def test_the_t_quantile_is_that_of_the_tables(freedom, quantile):
    assert _student(1.959964, freedom) == pytest.approx(quantile, rel=0.01)


def clustered(rng, repeats, scale=1.0, shared=None, own=0.05):
    """Repeats of 24 latencies each, alike within a repeat; `shared` is what disturbed both sides."""
    level = rng.normal(0, own, repeats) + (rng.normal(0, 0.1, repeats) if shared is None else shared)
    level += 0.5 * (rng.random(repeats) < 0.1)  # something else ran
    return [list(scale * np.exp(each + rng.normal(0, 0.1, 24))) for each in level]


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("repeats", [5, 20])
def test_95_of_100_intervals_cover_the_true_ratio(paired, statistic, repeats):
    rng, tries, hits = np.random.default_rng(repeats), 200, 0
    for seed in range(tries):
        drift = rng.normal(0, 0.1, repeats) if paired else None
        new, old = clustered(rng, repeats, 1.1, drift), clustered(rng, repeats, 1.0, drift)
        found = ratio(new, old, statistic, paired=paired, resamples=500, seed=seed)
        hits += found.low <= 1.1 <= found.high
    assert hits / tries > 0.90  # 95 % of 200, less three standard deviations


def test_tokens_of_one_repeat_are_no_independent_evidence():
    rng = np.random.default_rng(0)
    new, old = clustered(rng, 12), clustered(rng, 12)
    repeats = ratio(new, old, "mean", paired=False)
    tokens = ratio([[t] for b in new for t in b], [[t] for b in old for t in b], "mean", paired=False)
    assert repeats.high - repeats.low > 2 * (tokens.high - tokens.low)


def test_what_disturbs_both_sides_cancels_out_in_pairs():
    rng = np.random.default_rng(0)
    drift = np.linspace(0, 0.5, 20)
    new, old = (clustered(rng, 20, scale, drift, own=0.02) for scale in (1.1, 1.0))
    turns, apart = (ratio(new, old, "p50", paired=paired) for paired in (True, False))
    assert turns.high - turns.low < (apart.high - apart.low) / 2
    assert turns.low < 1.1 < turns.high


def test_the_same_samples_give_the_same_interval_and_one_repeat_gives_none():
    rng = np.random.default_rng(0)
    new, old = clustered(rng, 5), clustered(rng, 7)
    assert ratio(new, old, "p95", paired=False) == ratio(new, old, "p95", paired=False)
    alone = ratio([[2.0, 4.0]], [[1.0]], "mean", paired=True)
    assert (pytest.approx(3.0), None, None, 1) == (alone.estimate, alone.low, alone.high, alone.repeats)


def test_tokens_that_come_in_no_time_can_be_compared():
    found = ratio([[0.0, 0.0, 9.0]] * 5, [[0.0, 0.0, 6.0]] * 5, "p50", paired=True)
    assert (found.estimate, found.low, found.high) == (1.0, 1.0, 1.0)
    assert ratio([[0.0, 9.0]] * 5, [[0.0, 6.0]] * 5, "mean", paired=True).estimate == pytest.approx(1.5)
