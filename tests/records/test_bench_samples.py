"""A benchmark's samples: latencies as tokens came, kept and read back; figures only of what did not fail."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from xinfer.engine.engine import Engine
from xinfer.engine.speculative import NgramProposer, Speculator
from xinfer.engine.stats import request_stats
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import UsageError
from xinfer.records.bench_samples import Measured, Repeat, RequestSample, Side, read_sides, repeat_from, write_sides
from xinfer.records.bench_summary import spread, summary, tokens_per_second
from xinfer.testing.fake import EOS, FakeRunner, FakeTokenizer
from xinfer.testing.timed import TimedRunner, VirtualClock


def sample(itl=(20.0, 30.0), ttft=100.0, tokens_in=64, error=None) -> RequestSample:
    return RequestSample(tokens_in, len(itl) + 1, ttft, tuple(itl), ttft + sum(itl), error)


def side(*measured: Measured) -> Side:
    return Side({"backend.name": "fake", "model.dtype": "float32"}, {"commit": "0123456789abc", "dirty": True},
                {"resident_weight_bytes": 5}, list(measured))  # fmt: skip


def run(engine: Engine, prompt: list[int], tokens: int) -> RequestSample:
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    (output,) = (output for step in engine.run() for output in step.finished)
    return RequestSample.of(output)


def test_a_step_that_brings_several_tokens_counts_as_several():
    """Steps at .5, .6, .8 and 1.2 s bring 1, 2, 4 and 1 tokens: 7 gaps with a mean of .1 s, not 3 with one of .233."""
    times = [0.5, 0.6, 0.6, 0.8, 0.8, 0.8, 0.8, 1.2]
    stats = request_stats(5, 0, [("waiting", 0.0), ("prefill", 0.0), ("finished", 1.2)], times, seed=0)
    found = RequestSample(5, stats.generated_tokens, stats.ttft_ms, stats.itl_ms, stats.e2e_ms)
    assert found.ttft_ms == pytest.approx(500)
    assert len(found.itl_ms) == 7
    assert found.tpot_ms == pytest.approx(100)


def test_guessed_tokens_that_come_together_are_counted_one_by_one():
    clock = VirtualClock()
    runner = TimedRunner(clock, fixed_ms=10, token_ms=0, context_ms=0, script=lambda context: 5 + len(context) % 4)
    prompt = [5 + place % 4 for place in range(16)]
    engine = Engine(runner, None, Limits(), speculator=Speculator(NgramProposer(), 3), clock=clock)
    found = run(engine, prompt, 24)
    assert runner.steps < 24  # guesses were right
    assert len(found.itl_ms) == found.output_tokens - 1 == 23
    assert found.tpot_ms == pytest.approx((runner.steps - 1) * 10 / 23)
    assert found.ttft_ms == pytest.approx(10)


def test_the_time_to_the_first_token_is_no_gap_between_tokens():
    clock = VirtualClock()
    engine = Engine(TimedRunner(clock, fixed_ms=10, token_ms=1, context_ms=0), None, Limits(), clock=clock)
    found = run(engine, [1] * 50, 4)
    assert found.ttft_ms == pytest.approx(60)
    assert found.itl_ms == pytest.approx((11, 11, 11))


@pytest.mark.parametrize("token", [EOS, ord(" "), 0xE4])
def test_tokens_are_counted_as_they_came_whatever_text_they_make(token):
    """Special tokens leave no text, spaces would be read back as fewer tokens, halves of characters as others."""
    engine = Engine(FakeRunner(script=lambda context: token), FakeTokenizer(), Limits())
    assert run(engine, [1] * 5, 7).output_tokens == 7


def test_latencies_are_those_of_requests_that_did_not_fail():
    broken = sample(itl=(), ttft=0.1, error="the logits are not finite")
    whole = Measured("pp64+tg3", 2, [Repeat((sample(), broken), 200.0), Repeat((broken, sample()), 200.0)])
    figures = summary(whole)
    assert (figures["completed"], figures["failed"]) == (2, 2)
    assert figures["errors"] == ["the logits are not finite"]
    assert (figures["count_ttft_ms"], figures["mean_ttft_ms"]) == (2, 100)
    assert (figures["count_itl_ms"], figures["mean_itl_ms"]) == (4, 25)
    assert figures["mean_tok_s"] == pytest.approx((64 + 3) / 0.2)


def test_where_all_failed_there_are_no_figures_and_no_crash():
    figures = summary(Measured("tg2", 1, [Repeat((sample(error="broken"),), 5.0)]))
    assert figures["failed"] == 1
    assert figures["mean_tok_s"] is figures["p99_itl_ms"] is figures["energy_j"] is None


def test_a_percentile_has_its_method_its_count_and_no_data_of_nothing():
    assert spread([], "x")["count_x"] == 0
    assert all(value is None for name, value in spread([None], "x").items() if name != "count_x")
    assert spread([7], "x") == {"count_x": 1, "std_x": 0} | {
        f"{name}_x": 7 for name in ("mean", "median", "min", "max", "p50", "p95", "p99")
    }
    five = spread([40, 10, 100, 30, 20], "x")
    assert five["p99_x"] == pytest.approx(97.6)  # linear; the nearest rank would be 100
    assert (five["count_x"], five["min_x"], five["max_x"], five["median_x"], five["mean_x"]) == (5, 10, 100, 30, 40)
    assert summary(Measured("tg2", 1, []))["percentiles"] == {"method": "linear"}


def test_throughput_is_that_of_what_the_shape_is_about():
    fast, slow = sample(ttft=50.0), sample(itl=(40.0, 60.0), ttft=100.0)
    both = Repeat((fast, slow), 250.0)
    assert tokens_per_second("pp64", both) == pytest.approx(128 / 0.1)  # until the last first token
    assert tokens_per_second("tg2", both) == pytest.approx(4 / 0.1)  # the slowest sequence's two
    assert tokens_per_second("tg2@64", both) == tokens_per_second("tg2", both)
    assert tokens_per_second("pp64+tg3", both) == pytest.approx(134 / 0.25)


def test_what_was_measured_is_read_back_as_it_was(tmp_path: Path):
    failed = sample(itl=(), ttft=None or 0.0, error="it broke")
    first = Repeat((sample(), failed), 200.5, cached_tokens=3, roofline=0.25, energy_j=1.5, peak_memory_bytes=1 << 30)
    sides = [side(Measured("tg2", 2, [first, Repeat((sample(),), 1.0)])), side()]
    write_sides(tmp_path / "bench.json", sides, gate=None)
    assert read_sides(tmp_path / "bench.json") == sides
    assert repeat_from(json.loads(json.dumps(asdict(first)))) == first


GOOD = {"schema": 1, "sides": [asdict(side(Measured("tg2", 1, [Repeat((sample(),), 1.0)])))]}
TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    "text",
    [
        TEXT[:-20],
        "[]",
        "7",
        '{"date": "2026-12-01", "output_throughput": 12.5}',
        '{"schema": 1, "sides": []}',
        TEXT.replace('"schema": 1', '"schema": 2'),
        TEXT.replace("[20.0, 30.0]", "[20.0, NaN]"),
        TEXT.replace("[20.0, 30.0]", "[20.0, -1]"),
        TEXT.replace("[20.0, 30.0]", "[20.0, 1e999]"),
        TEXT.replace('"itl_ms"', '"gaps"'),
        TEXT.replace('"duration_ms": 1.0', '"duration_ms": "long"'),
        None,
    ],
    ids=["cut", "list", "number", "foreign", "empty", "newer", "nan", "negative", "inf", "field", "word", "absent"],
)
def test_a_file_that_is_damaged_or_something_else_is_refused_in_one_line(text, tmp_path: Path):
    file = tmp_path / "baseline.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match="holds no benchmark") as refused:
        read_sides(file)
    assert str(file) in str(refused.value)
