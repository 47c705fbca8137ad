"""Figures are what their formulas say, and null where there is nothing to measure."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinfer.engine.stats import percentile, request_stats, summarize

seconds = st.floats(0, 1e3, allow_nan=False)


def figures_of(prompt, arrived, started, times, ended, seed, cached=0, aside=()):
    """The figures of a request that waited, ran, was put aside for these stretches of time, and ended."""
    history = [("waiting", arrived)] + ([("prefill", started)] if started is not None else [])
    for begin, end in aside:
        history += [("preempted", begin), ("prefill", end)]
    history += [("decode", times[0])] if times else []
    return request_stats(prompt, cached, [*history, ("finished", ended)], times, seed)


def chunks_of_b01():
    """The stream of case B01: at .5, .6, .8 and 1.2 s came 1, 2, 4 and 1 tokens, after a request at 0."""
    return figures_of(6, 0.0, 0.2, [0.5, 0.6, 0.6, 0.8, 0.8, 0.8, 0.8, 1.2], 1.3, 7)


def test_chunks_are_not_tokens():
    stats = chunks_of_b01()
    assert stats.ttft_ms == pytest.approx(500)
    assert stats.tpot_ms == pytest.approx(100)
    assert stats.generated_tokens == 8


def test_the_first_token_is_no_gap():
    assert chunks_of_b01().itl_ms == pytest.approx((100, 0, 200, 0, 0, 0, 400))


def test_every_time_has_its_two_ends():
    stats = chunks_of_b01()
    assert stats.queue_ms == pytest.approx(200)
    assert stats.prefill_ms == pytest.approx(300)
    assert stats.decode_ms == pytest.approx(700)
    assert stats.e2e_ms == pytest.approx(1300)
    assert stats.prefill_tok_s == pytest.approx(6 / 0.3)
    assert stats.decode_tok_s == pytest.approx(8 / 0.7)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.seed) == (6, 0, 7)


def test_without_a_token_there_are_only_the_times_that_passed():
    stats = figures_of(6, 1.0, 1.5, [], 2.0, 7)
    assert (stats.generated_tokens, stats.queue_ms, stats.e2e_ms) == (0, 500, 1000)
    assert (stats.ttft_ms, stats.prefill_ms, stats.decode_ms, stats.tpot_ms) == (None,) * 4
    assert (stats.prefill_tok_s, stats.decode_tok_s, stats.itl_ms) == (None, None, ())


def test_a_request_that_never_ran_has_no_queue_time():
    stats = figures_of(6, 1.0, None, [], 2.0, 7)
    assert (stats.queue_ms, stats.prefill_ms, stats.e2e_ms) == (None, None, 1000)


def test_time_spent_aside_is_not_prefill():
    stats = figures_of(6, 1.0, 1.5, [3.0, 4.0], 4.0, 7, aside=[(1.75, 2.5)])
    assert (stats.queue_ms, stats.prefill_ms, stats.ttft_ms, stats.decode_ms) == (500, 750, 2000, 1000)


def test_the_rate_of_prefill_counts_what_was_computed():
    assert figures_of(60, 0.0, 0.0, [0.5], 0.5, 7, cached=48).prefill_tok_s == 24
    assert figures_of(60, 0.0, 0.0, [0.5], 0.5, 7, cached=60).prefill_tok_s is None


def test_one_token_has_no_decode():
    stats = figures_of(6, 1.0, 1.5, [1.75], 2.0, 7)
    assert (stats.generated_tokens, stats.ttft_ms, stats.prefill_ms, stats.prefill_tok_s) == (1, 750, 250, 24)
    assert (stats.decode_ms, stats.decode_tok_s, stats.tpot_ms, stats.itl_ms) == (None, None, None, ())


def test_two_tokens_have_one_gap():
    stats = figures_of(6, 1.0, 1.5, [1.75, 2.25], 2.5, 7)
    assert (stats.decode_ms, stats.tpot_ms, stats.itl_ms, stats.decode_tok_s) == (500, 500, (500,), 4)


def test_no_time_gives_no_rate():
    stats = figures_of(6, 1.0, 1.5, [1.5, 1.5], 1.5, 7)
    assert (stats.prefill_tok_s, stats.decode_tok_s, stats.tpot_ms) == (None, None, 0)


@given(st.lists(seconds, min_size=2, max_size=20).map(sorted))
def test_gaps_are_one_less_than_tokens_and_add_up_to_decode(times):
    stats = figures_of(1, 0.0, 0.0, times, times[-1], 0)
    assert len(stats.itl_ms) == stats.generated_tokens - 1
    assert sum(stats.itl_ms) == pytest.approx(stats.decode_ms, abs=1e-6)
    assert stats.tpot_ms == pytest.approx(sum(stats.itl_ms) / len(stats.itl_ms), abs=1e-6)


@pytest.mark.parametrize(
    ("samples", "q", "expected"),
    [
        ([], 50, None),
        ([None, None], 99, None),
        ([7], 0, 7),
        ([7], 99, 7),
        ([7, None], 50, 7),
        ([10, 20, 30, 40, 100], 50, 30),
        ([10, 20, 30, 40, 100], 99, 97.6),
        ([100, 40, 30, 20, 10], 99, 97.6),
        ([10, 20, 30, 40, 100], 100, 100),
    ],
)
def test_percentiles_interpolate_and_survive_few_samples(samples, q, expected):
    assert percentile(samples, q) == (expected if expected is None else pytest.approx(expected))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(0, 100))
def test_a_percentile_lies_between_the_two_samples_of_its_rank(samples, q):
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * q / 100
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    assert percentile(samples, q) == pytest.approx(low + (high - low) * (rank - math.floor(rank)), rel=1e-9, abs=1e-6)


def test_a_run_of_one_request_has_its_figures():
    stats = chunks_of_b01()
    figures = summarize([stats], 2.0)
    same = "prompt_tokens cached_tokens generated_tokens queue_ms prefill_ms decode_ms prefill_tok_s decode_tok_s"
    for name in [*same.split(), "ttft_ms", "tpot_ms", "e2e_ms"]:
        assert figures[name] == pytest.approx(getattr(stats, name)), name
    assert figures["output_tok_s"] == 4
    assert figures["percentiles"]["method"] == "linear"
    assert figures["itl_ms"] == 0
    assert figures["percentiles"]["itl_ms"] == {
        "count": 7,
        "p50": 0,
        "p95": pytest.approx(340),
        "p99": pytest.approx(388),
    }


def test_a_run_of_several_adds_up_tokens_and_times_over_those_that_have_them():
    none, one = figures_of(6, 0.0, None, [], 1.0, 1), figures_of(4, 0.0, 0.5, [1.0], 1.0, 2)
    two = figures_of(2, 0.0, 0.5, [1.0, 3.0], 3.0, 3)
    figures = summarize([none, one, two], 3.0)
    assert (figures["requests"], figures["prompt_tokens"], figures["generated_tokens"]) == (3, 12, 3)
    assert (figures["prefill_ms"], figures["decode_ms"]) == (1000, 2000)
    assert (figures["prefill_tok_s"], figures["decode_tok_s"], figures["output_tok_s"]) == (6, 1, 1)
    assert (figures["ttft_ms"], figures["tpot_ms"], figures["percentiles"]["itl_ms"]["count"]) == (1000, 2000, 1)


def test_a_run_without_requests_has_no_data_rather_than_an_error():
    figures = summarize([], 0.0)
    assert (figures["requests"], figures["generated_tokens"], figures["percentiles"]["itl_ms"]["count"]) == (0, 0, 0)
    empty = "prefill_ms decode_ms prefill_tok_s decode_tok_s output_tok_s ttft_ms tpot_ms queue_ms e2e_ms"
    assert [figures[name] for name in empty.split()] == [None] * 9
