"""`python -m xinfer bench` from the command line to the exit code, with exact times on a clock of its own."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from xinfer.cli import run
from xinfer.engine.engine import Engine
from xinfer.records.bench_samples import read_sides
from xinfer.tasks import bench_run
from xinfer.tasks.bench_sides import take_turns
from xinfer.tasks.bench_work import Work
from xinfer.testing.fake import FakeRunner
from xinfer.testing.timed import TimedRunner, VirtualClock

FAKE = ("backend=fake", "bench.repeats=5")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the task in this process, in an empty folder; returns (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XINFER_LOG", "error")
    monkeypatch.setattr(sys, "argv", ["xinfer"])

    def call(*words: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        code = run(["bench", *words])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def timed(fake_backend, monkeypatch: pytest.MonkeyPatch):
    """Install a backend whose steps take 20 ms, and half a millisecond a token, times the next of the factors."""
    clock = VirtualClock()
    monkeypatch.setattr("xinfer.session.Engine", partial(Engine, clock=clock))

    def install(*slower: float, weights: tuple[int, ...] = (), **options):
        factors, bytes_ = iter(slower or (1.0,) * 9), iter(weights or (1000,) * 9)

        def create() -> TimedRunner:
            factor = next(factors)
            costs = {"fixed_ms": 20 * factor, "token_ms": 0.5 * factor, "context_ms": 0}
            runner = TimedRunner(clock, **costs, **options)
            runner.info = replace(runner.info, resident_weight_bytes=next(bytes_))
            return runner

        return fake_backend(create)

    return install


def rows(out: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in out.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def folders(path: Path) -> Iterator[Path]:
    return (file.parent for file in path.rglob("run.json"))


def test_a_row_has_the_times_of_the_work_that_it_names(bench, timed, tmp_path: Path):
    timed()
    code, out, err = bench(*FAKE, "bench.tests=[pp64,tg32,pp64+tg3,tg4@40]", "bench.batch=[1,4]")
    assert code == 0, err
    found = {(row["test"], row["batch"]): row for row in rows(out)}
    assert len(found) == 8
    expected = {  # tokens a second, time to first token, time from token to token
        ("pp64", "1"): (64 / 0.052, "52.00", "-"),
        ("pp64", "4"): (256 / 0.148, "148.00", "-"),
        ("tg32", "1"): (1 / 0.0205, "20.50", "20.50"),
        ("tg32", "4"): (4 / 0.022, "22.00", "22.00"),
        ("pp64+tg3", "1"): (67 / 0.093, "52.00", "20.50"),
        ("tg4@40", "4"): (4 / 0.022, "100.00", "22.00"),
    }
    for work, (rate, first, gap) in expected.items():
        row = found[work]
        assert row["tokens/s"] == f"{rate:.1f} ± 0.0", work
        assert (row["TTFT ms p50"], row["TPOT ms"], row["p99"]) == (first, gap, gap), work
        assert (row["n"], row["backend"], row["dtype"]) == ("5", "fake", "float32")
        assert all(row.values())
    (folder,) = folders(tmp_path)
    assert f"record  {folder}" in err


def test_the_runs_folder_has_every_token_of_every_repeat(bench, timed, tmp_path: Path):
    timed()
    assert bench(*FAKE, "bench.tests=pp9+tg4", "bench.batch=3")[0] == 0
    (folder,) = folders(tmp_path)
    (side,) = read_sides(folder / "bench.json")
    (measured,) = side.measured
    assert len(measured.repeats) == 5
    assert all(len(request.itl_ms) == 3 for repeat in measured.repeats for request in repeat.requests)
    assert all(repeat.cached_tokens == 0 and len(repeat.requests) == 3 for repeat in measured.repeats)
    (figures,) = json.loads((folder / "stats.json").read_text())["sides"][0]["tests"]
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (5 * 3 * 9, 5 * 3 * 4)
    assert (figures["count_itl_ms"], figures["percentiles"]) == (45, {"method": "linear"})
    assert figures["median_itl_ms"] == pytest.approx(21.5)
    info = json.loads((folder / "run.json").read_text())
    assert (info["task"], info["status"]) == ("bench", "completed")


def test_prompts_are_the_same_in_each_run_and_never_twice_in_one(bench, timed):
    (runners, seen) = (timed(), [])
    for seed in ("3", "3", "4"):
        code, *_ = bench(*FAKE, "bench.tests=pp32", "bench.warmup=0", "--seed", seed, "record=none")
        assert code == 0
        tokens = runners[-1]._tokens
        seen.append(tokens[tokens >= 0].tolist())
    assert seen[0] == seen[1] != seen[2]
    assert len(set(map(tuple, zip(*[iter(seen[0])] * 32, strict=False)))) == 5


def test_warming_up_is_not_measured(bench, timed):
    (runners, code) = (timed(stall=lambda step: 1000 if step <= 2 else 0), 0)
    code, out, _ = bench(*FAKE, "bench.tests=pp8", "bench.warmup=2", "--bench", "3", "record=none")
    assert (code, runners[0].steps) == (0, 5)
    assert rows(out)[0]["TTFT ms p50"] == "24.00"


def test_sides_take_turns_and_the_ratio_is_told_in_one_line(bench, timed, tmp_path: Path):
    runners = timed(1.1, 1.0)
    words = ("--against", "fake", "bench.against_overrides=['engine.max_queue=7']")
    code, out, err = bench(*FAKE, "bench.tests=tg8", *words)
    assert code == 0, err  # slower than another backend is no failure
    assert "tg8 batch 1: ITL p50 22.55 and 20.50 ms, ratio 1.100 [1.100, 1.100] of 5 repeats" in out
    assert len(rows(out)) == 2
    assert [runner.steps for runner in runners] == [6 * 9, 6 * 9]
    first, second = read_sides(next(folders(tmp_path)) / "bench.json")
    assert (first.facts["engine.max_queue"], second.facts["engine.max_queue"]) == (100_000, 7)


def test_two_sides_alternate_so_that_drift_hits_both():
    order: list[str] = []

    def sides(name: str):
        return lambda work: order.append(name)

    found = take_turns([sides("A"), sides("B")], Work.parse("tg1", 1), warmup=1, repeats=4)
    assert "".join(order) == "BA" + "ABBAABBA"
    assert [len(measured.repeats) for measured in found] == [4, 4]


def test_a_baseline_passes_what_is_as_fast_and_fails_what_is_slower(bench, timed, tmp_path: Path):
    timed(1.0, 1.0, 1.04, 1.1, 1.1)
    words = (*FAKE, "bench.tests=[tg8,pp8]")
    assert bench(*words, "bench.save_baseline=old.json")[0] == 0
    held = (*words, "bench.baseline=old.json")
    assert [bench(*held)[0] for _ in range(3)] == [0, 0, 1]
    code, out, _ = bench(*held, "bench.max_regression=0.2", "json_stats=figures.json")
    assert code == 0
    assert "tg8 batch 1: ITL p95 22.55 and 20.50 ms, ratio 1.100 [1.100, 1.100] of 5 repeats pass" in out
    assert "pp8 batch 1: TTFT p50 26.40 and 24.00 ms, ratio 1.100" in out
    gate = json.loads((tmp_path / "figures.json").read_text())["gate"]
    assert gate["verdict"] == "pass" and len(gate["comparisons"]) == 6


def test_what_cannot_be_compared_is_refused_and_says_what_differs(bench, timed, tmp_path: Path):
    timed()
    bench(*FAKE, "bench.tests=tg8", "bench.save_baseline=old.json", "record=none")
    held = (*FAKE, "bench.tests=[tg8,pp8]", "bench.baseline=old.json")
    code, out, err = bench(*held, "engine.max_num_seqs=8", "sampling.temperature=0.5")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    for part in (
        "not comparable with old.json",
        "engine.max_num_seqs is 8, was 32",
        "sampling.effective is",
        "lacks pp8",
    ):
        assert part in err
    content = json.loads((tmp_path / "old.json").read_text())
    content["sides"][0]["facts"] |= {"hardware.cpu": "another", "versions.torch": "1.0"}
    (tmp_path / "old.json").write_text(json.dumps(content))
    code, _, err = bench(*FAKE, "bench.tests=tg8", "bench.baseline=old.json")
    assert code == 2
    assert "hardware.cpu is " in err and "versions.torch is " in err and "was 'another'" in err
    assert not list(folders(tmp_path))


def test_more_memory_fails_unless_somebody_says_why(bench, timed, tmp_path: Path):
    timed(weights=(1000, 1200, 1200))
    words = (*FAKE, "bench.tests=tg8")
    bench(*words, "bench.save_baseline=old.json")
    code, out, _ = bench(*words, "bench.baseline=old.json")
    assert code == 1
    assert (
        'resident_weight_bytes grew from 0.0 MiB to 0.0 MiB, more than a tenth: say why with bench.reason="..."' in out
    )
    assert bench(*words, "bench.baseline=old.json", "--bench.reason", "a second head, for drafts")[0] == 0
    reasons = [json.loads((folder / "bench.json").read_text())["gate"] for folder in folders(tmp_path)]
    assert "a second head, for drafts" in [gate["reason"] for gate in reasons if gate]


def test_few_repeats_pass_with_a_word_of_doubt(bench, timed):
    timed(1.0, 3.0)
    words = ("backend=fake", "bench.tests=tg8", "bench.repeats=4", "record=none")
    bench(*words, "bench.save_baseline=old.json")
    code, out, _ = bench(*words, "bench.baseline=old.json")
    assert code == 0
    assert "of 4 repeats inconclusive" in out


@pytest.mark.parametrize(("broken", "count"), [(lambda context: context[0] % 2 == 0, 0), (lambda context: True, 10)])
def test_failed_requests_are_counted_and_said_and_count_for_no_latency(bench, timed, tmp_path: Path, broken, count):
    timed(nan_rows=broken)
    code, out, err = bench(*FAKE, "bench.tests=pp8", "bench.batch=2")
    assert code == 3
    assert "requests failed, and count for no latency: the model's logits are not finite" in err
    (folder,) = folders(tmp_path)
    (figures,) = json.loads((folder / "stats.json").read_text())["sides"][0]["tests"]
    assert 0 < figures["failed"] <= 10 and figures["completed"] + figures["failed"] == 10
    assert figures["count_ttft_ms"] == figures["completed"]
    if count:
        assert figures["failed"] == 10 and rows(out)[0]["tokens/s"] == "no data"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench.tests=pp",), "bench.tests: 'pp' is unknown: expected are ppN, tgN, tgN@CONTEXT or ppN+tgM"),
        (("bench.tests=tg0",), "'tg0' is out of range"),
        (("bench.tests=pp99999999999",), "is out of range"),
        (("bench.tests=[]",), "names nothing"),
        (("bench.tests=[tg8,tg8]",), "one thing twice"),
        (("bench.batch=1,8",), "make it a list with []"),
        (("bench.batch=[1,0]",), "bench.batch=0 is out of range"),
        (("bench.batch=true",), "bench.batch=True is out of range"),
        (("bench.batch=33",), "more than engine.max_num_seqs=32: raise that"),
        (("bench.tests=pp512",), "pp512 takes sequences of 513 tokens, but 512 is the longest that can run"),
        (("bench.tests=pp400", "bench.batch=16"), "takes 6416 tokens of KV cache, which holds 4096"),
        (("bench.tests=tg8@400", "bench.batch=6"), "raise engine.max_num_batched_tokens=2048"),
        (("--bench", "0"), "bench.repeats=0 is out of range"),
        (("bench.warmup=-1",), "bench.warmup=-1 is out of range"),
        (("bench.max_regression=nan",), "bench.max_regression=nan"),
        (("--against", "eagre"), "backend=eagre is unknown (did you mean 'eager'?)"),
        (("bench.baseline=nowhere.json",), "nowhere.json holds no benchmark"),
        (("bench.baseline=a", "--against", "fake"), "give one of them"),
        (("bench.against_checkout=.", "--against", "fake"), "give one of them"),
        (("bench.against_checkout=.",), "holds no xinfer/: name a checkout"),
        (("bench.save_baseline=no/where.json",), "its folder is not there"),
        (("--prompt", "hi"), "leave prompts out"),
        (("bench.repeat=3",), "did you mean 'bench.repeats'"),
    ],
)
def test_bad_usage_is_one_clear_line_and_leaves_nothing(bench, timed, tmp_path: Path, words, message):
    timed()
    code, out, err = bench("backend=fake", "bench.tests=tg8", *words)
    assert (code, out) == (2, ""), err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not list(folders(tmp_path))


def test_what_a_token_brings_to_the_host_is_told_where_there_is_another_device(
    bench, timed, monkeypatch, tmp_path: Path
):
    timed()
    resources = []
    for device in ("cpu", "cuda"):  # whose logits this runner has on the host
        make = TimedRunner.__init__

        def at(runner, *arguments, device=device, make=make, **options):
            make(runner, *arguments, **options)
            runner.info = replace(runner.info, device=device)

        monkeypatch.setattr(TimedRunner, "__init__", at)
        monkeypatch.setattr(bench_run, "_synchronize", lambda device: None)
        assert bench(*FAKE, "bench.tests=tg8", f"bench.save_baseline={device}.json", "record=none")[0] == 0
        resources.append(read_sides(tmp_path / f"{device}.json")[0].resources)
    assert [found["read_back_bytes_per_token"] for found in resources] == [None, 260 * 4]
    assert resources[1]["energy_source"].startswith("none: NVML does not tell")


def test_each_side_has_the_number_of_threads_that_it_wants(bench, fake_backend):
    seen: list[int] = []

    class Many(FakeRunner):
        def forward(self, batch):
            torch.set_num_threads(3)
            return super().forward(batch)

    class Usual(FakeRunner):
        def forward(self, batch):
            seen.append(torch.get_num_threads())
            return super().forward(batch)

    kinds = iter((Many, Usual))
    fake_backend(lambda: next(kinds)())
    assert bench(*FAKE, "bench.tests=tg2", "--against", "fake", "record=none")[0] == 0
    assert set(seen) == {1}
