"""The gate fails on evidence, not on noise: identical code passes, real slowdowns don't, and doubts are said."""

import numpy as np
import pytest

from xinfer.records.bench_gate import Gate, differences, judge
from xinfer.records.bench_samples import Measured, Repeat, RequestSample, Side


def side(blocks, shape="tg16", weights=1000, peak=None, name="fake") -> Side:
    """One sequence a repeat with these gaps; for prompts, their first token after the first of them."""
    repeats = [
        Repeat((RequestSample(9, len(gaps) + 1, gaps[0], tuple(gaps), sum(gaps)),), sum(gaps), peak_memory_bytes=peak)
        for gaps in blocks
    ]
    return Side({"backend.name": name}, {}, {"resident_weight_bytes": weights}, [Measured(shape, 1, repeats)])


def noisy(rng, scale=1.0, repeats=30, drift=None):
    level = rng.normal(0, 0.03, repeats) + (rng.normal(0, 0.05, repeats) if drift is None else drift)
    stalls = rng.random((repeats, 16)) < 0.03  # something else runs
    times = 10 * scale * np.exp(level[:, None] + rng.normal(0, 0.05, (repeats, 16))) + 20 * stalls
    return times.tolist()


def verdict(new: Side, old: Side, paired=True, max_regression=0.05, **options) -> str:
    return judge(new, old, paired=paired, max_regression=max_regression, **options).verdict


def verdicts(scale: float, paired: bool, tries: int = 40) -> list[str]:
    rng, found = np.random.default_rng(7), []
    for _ in range(tries):
        drift = rng.normal(0, 0.2, 30) if paired else None
        found.append(verdict(side(noisy(rng, scale, drift=drift)), side(noisy(rng, drift=drift)), paired))
    return found


@pytest.mark.parametrize("paired", [True, False])
def test_identical_code_fails_hardly_ever(paired):
    assert verdicts(1.0, paired).count("regression") <= 1


def test_a_tenth_more_time_is_noticed_where_both_took_turns():
    assert verdicts(1.1, paired=True).count("regression") >= 38


@pytest.mark.parametrize("paired", [True, False])
def test_three_tenths_more_time_is_always_noticed(paired):
    assert set(verdicts(1.3, paired, 15)) == {"regression"}


def test_being_faster_passes():
    assert "regression" not in verdicts(0.8, paired=True, tries=10)


def test_an_estimate_beyond_the_limit_with_an_interval_that_is_not_is_inconclusive():
    new, old = side([[12.0] * 9, [9.0] * 9, [12.0] * 9] * 2), side([[10.0] * 9] * 6)
    gate = judge(new, old, paired=True, max_regression=0.05)
    assert (gate.verdict, gate.failed) == ("inconclusive", False)
    mean, median, p95 = gate.comparisons
    assert (mean.verdict, median.verdict, p95.verdict) == ("told", "inconclusive", "inconclusive")
    assert median.ratio.estimate > 1.05 > median.ratio.low


def test_few_repeats_are_inconclusive_however_they_look():
    for scale in (1.0, 3.0):
        assert verdict(side([[10.0 * scale] * 9] * 4), side([[10.0] * 9] * 4)) == "inconclusive"
    assert verdict(side([[30.0] * 9] * 5), side([[10.0] * 9] * 5)) == "regression"
    assert verdict(side([[30.0] * 9] * 9), side([[10.0] * 9] * 4), paired=False) == "inconclusive"


def test_slow_tokens_fail_even_where_the_median_is_as_before():
    slow = [[10.0] * 9 + [40.0]] * 6
    gate = judge(side(slow), side([[10.0] * 10] * 6), paired=True, max_regression=0.05)
    assert {c.ratio.statistic: c.verdict for c in gate.comparisons} == {
        "mean": "told",
        "p50": "pass",
        "p95": "regression",
    }


def test_a_prompts_time_is_held_to_the_baseline_too():
    assert verdict(side([[11.0]] * 6, "pp64"), side([[10.0]] * 6, "pp64")) == "regression"
    gate = judge(side([[10.0]] * 6, "pp64"), side([[10.0]] * 6, "pp64"), paired=True, max_regression=0.05)
    assert {c.latency for c in gate.comparisons} == {"ttft"}


def test_there_is_a_floor_in_time_as_there_is_in_shares():
    new, old = side([[0.012] * 9] * 6), side([[0.010] * 9] * 6)
    assert verdict(new, old) == "regression"
    assert verdict(new, old, floor_ms=0.01) == "pass"
    assert verdict(new, old, max_regression=0.25) == "pass"


def test_without_a_limit_nothing_fails():
    gate = judge(side([[30.0] * 9] * 6, weights=5000), side([[10.0] * 9] * 6), paired=True, max_regression=None)
    assert (gate.verdict, gate.failed, gate.grown) == ("pass", False, {})
    assert {comparison.verdict for comparison in gate.comparisons} == {"told"}


@pytest.mark.parametrize(("weights", "peak"), [(1101, 1000), (1000, 1101)])
def test_a_tenth_more_memory_asks_for_a_reason(weights, peak):
    old, blocks = side([[10.0] * 9] * 6, peak=1000), [[10.0] * 9] * 6
    new = side(blocks, weights=weights, peak=peak)
    silent, explained = (
        judge(new, old, paired=True, max_regression=0.05, reason=reason) for reason in (None, "a second cache")
    )
    assert (silent.verdict, silent.failed) == ("memory", True)
    assert (explained.verdict, explained.failed, explained.reason) == ("pass", False, "a second cache")
    assert list(explained.grown.values()) == [(1101, 1000)]
    assert verdict(side(blocks, weights=1100, peak=1100), old) == "pass"


def test_memory_that_one_side_does_not_tell_is_not_compared():
    assert verdict(side([[10.0] * 9] * 6, weights=0, peak=None), side([[10.0] * 9] * 6, peak=5)) == "pass"


def test_a_repeat_that_failed_on_one_side_counts_on_neither():
    new, old = side([[30.0] * 9] * 6), side([[10.0] * 9] * 6)
    (request,) = new.measured[0].repeats[0].requests
    broken = RequestSample(9, 1, 0.1, (), 0.1, "it broke")
    new.measured[0].repeats[0] = Repeat((broken,), 0.1)
    gate = judge(new, old, paired=True, max_regression=0.05)
    assert {comparison.ratio.repeats for comparison in gate.comparisons} == {5}
    assert request.error is None and gate.verdict == "regression"
    for measured in (*new.measured, *old.measured):
        measured.repeats[:] = [Repeat((broken,), 0.1)] * 6
    nothing = judge(new, old, paired=True, max_regression=0.05)
    assert (nothing.comparisons, nothing.missing, nothing.verdict) == ((), ("tg16 batch 1",), "inconclusive")


def test_the_worst_of_all_counts():
    assert Gate((), (), {}, None).verdict == "pass"
    slow, grown = side([[30.0] * 9] * 6, weights=5000), side([[10.0] * 9] * 6)
    assert verdict(slow, grown) == "regression"


def test_what_differs_is_named_with_both_values():
    new, old = {"hardware.cpu": "A", "versions.torch": "2", "model.weights": "x"}, {"hardware.cpu": "B", "gone": 1}
    assert differences(new, old) == [
        "gone is None, was 1",
        "hardware.cpu is 'A', was 'B'",
        "model.weights is 'x', was None",
        "versions.torch is '2', was None",
    ]
    assert differences(new, old | {"model.weights": "x", "gone": None}, ignore=("versions",)) == [
        "hardware.cpu is 'A', was 'B'"
    ]
