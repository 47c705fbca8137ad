"""`python -m xinfer explain`: which run is meant, what is said of it, and nothing left behind."""

import json
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from xinfer.cli import run
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.types import Limits, SamplingParams
from xinfer.flags import parse
from xinfer.records import RunRecord
from xinfer.testing.fake import FakeTokenizer
from xinfer.testing.timed import TimedRunner, VirtualClock


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the task in this process, in an empty folder; returns (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xinfer"])

    def call(*words: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        code = run(["explain", *words])
        return code, *capfd.readouterr()

    return call


def record(folder: Path, requests: int = 1, tokens: int = 40, **options) -> Path:
    """Record requests that come together, of which two may run."""
    clock = VirtualClock()
    kept = RunRecord(folder, clock=clock, **options)
    observers = Observers(on_step=(kept.step,), on_request_finished=(kept.output,))
    limits = Limits(max_num_seqs=2)
    engine = Engine(TimedRunner(clock), FakeTokenizer(), limits, observers=observers, clock=clock)
    kept.update(config={"engine": {"max_num_seqs": 2}, "record": options})
    for _ in range(requests):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        kept.request(engine.add_request([1] * 32, params), {"prompt": "[bold]swordfish[/bold]"})
    for _ in engine.run():
        pass
    kept.finish("completed", {})
    return folder


def test_a_healthy_run_is_one_line_with_its_figures(explain, tmp_path: Path):
    folder = record(tmp_path / "a")
    code, out, err = explain(str(folder))
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    assert line.startswith(f"{folder}: completed, nothing held it back: 1 request, 40 tokens at ")
    assert "36 ms until the first token" in line and "ms from token to token" in line


def test_what_held_a_run_back_is_said_with_the_setting_to_try(explain, tmp_path: Path):
    folder = record(tmp_path / "[a]", requests=8)
    code, out, _ = explain(str(folder))
    assert code == 0
    first, _, title, text, setting = out.splitlines()
    assert first.startswith(f"{folder}: completed, 8 requests, 320 tokens at ")
    assert title.startswith("1. queueing  ")
    assert "engine.max_num_seqs=2 places" in text
    assert setting == "try  engine.max_num_seqs=8"


def test_the_latest_run_is_the_one_started_last(explain, tmp_path: Path):
    old = record(tmp_path / "outputs/2026-01-02/b")
    new = record(tmp_path / "outputs/sweeps/2026-01-01/a/0")
    for folder, day in ((old, 1), (new, 2)):
        info = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(info | {"started": f"2026-01-0{day}T00:00:00+00:00"}))
    (tmp_path / "outputs" / "broken").mkdir()
    (tmp_path / "outputs" / "broken" / "run.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    for words in ((), ("latest",), ("run=latest",)):
        code, out, err = explain(*words)
        assert code == 0, err
        assert out.startswith("outputs/sweeps/2026-01-01/a/0: completed, ")
    assert {path for path in tmp_path.rglob("*") if not path.name.startswith(".index")} == {*before}


def test_a_failed_run_says_of_what(explain, tmp_path: Path):
    folder = record(tmp_path / "a")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"status": "failed", "error": "RuntimeError: [Errno 5]"}))
    assert ": failed (RuntimeError: [Errno 5]), nothing held it back" in explain(str(folder))[1]
    (folder / "run.json").write_text(json.dumps(info | {"status": "running"}))
    assert ": running, or killed, nothing held it back" in explain(str(folder))[1]


def test_bad_input_is_one_clear_line(explain, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for words, message in [
        ((), "there is no such run under outputs/ yet"),
        (("nowhere",), "nowhere is no run's folder, and part of none"),
        (("empty",), "empty is no run's folder, and part of none"),
        ((str(record(tmp_path / "off", steps="off")),), "record.steps=off"),
        ((str(record(tmp_path / "short", tokens=3)),), "has 3 steps, too few to say anything: at least 20 are needed"),
        (("a", "b"), "unexpected word 'b'"),
    ]:
        code, out, err = explain(*words)
        assert (code, out) == (2, ""), words
        assert message in err
        assert len(err.strip().splitlines()) == 1, err


def test_only_a_task_that_takes_a_word_gets_one():
    assert parse(["explain", "outputs/a=b,c/d"]).overrides == ["task=explain", "run='outputs/a=b,c/d'"]
    assert parse(["explain", "run=x"]).overrides == ["task=explain", "run=x"]
