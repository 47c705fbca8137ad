"""A run's folder: written as it goes, private where asked, readable whatever happened."""

import json
from pathlib import Path

import pytest

from xinfer.engine.engine import Engine, Observers
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError, UsageError
from xinfer.records import RunRecord, redacted, write_report
from xinfer.records import record as record_module
from xinfer.records.provenance import Provenance, combined, git_state
from xinfer.records.reader import read_run
from xinfer.records.report import latency_picture
from xinfer.testing.fake import FakeRunner, FakeTokenizer

PROMPT = "the secret word is swordfish <script>"


def generate(folder: Path, text: str = "full", steps: str = "all", tokens: int = 12, n: int = 1) -> RunRecord:
    """Record a run of two requests on a runner without a model."""
    record = RunRecord(folder, text, steps)
    observers = Observers(on_step=(record.step,), on_request_finished=(record.output,))
    engine = Engine(FakeRunner(), FakeTokenizer(), Limits(), observers=observers)
    record.update(config={"backend": {"name": "fake"}}, seed=0, versions={"torch": "2"})
    for _ in range(2):
        request = engine.add_request(list(PROMPT.encode()), SamplingParams(n=n, max_tokens=tokens, ignore_eos=True))
        record.request(request, {"prompt": PROMPT, "system": None, "stop": [], "chat": False})
    for _ in engine.run():
        pass
    return record


def test_everything_can_be_read_back(tmp_path: Path):
    generate(tmp_path).finish("completed", {"generated_tokens": 24})
    run = read_run(tmp_path)
    assert run.status == "completed"
    assert run.stats == {"generated_tokens": 24}
    assert run.requests[1]["prompt"] == PROMPT
    assert run.requests[1]["prompt_token_ids"] == list(PROMPT.encode())
    assert len(run.outputs[1]["token_ids"]) == 12
    assert [step["step"] for step in run.steps] == list(range(12))
    assert run.steps[0]["prefill_tokens"] == 2 * len(PROMPT)
    states = [state for state, _ in run.outputs[0]["history"]]
    assert states == ["waiting", "prefill", "decode", "finished"]


def test_a_run_that_never_ended_can_be_read(tmp_path: Path):
    generate(tmp_path)
    with (tmp_path / "requests.jsonl").open("a") as stream:
        stream.write('{"event": "output", "index": 7, "te')  # the process died in the middle of a line
    run = read_run(tmp_path)
    assert run.status == "running"
    assert set(run.outputs) == {0, 1}
    write_report(tmp_path)


@pytest.mark.parametrize("text", ["hash", "off"])
def test_texts_can_be_kept_out(tmp_path: Path, text: str):
    generate(tmp_path, text).finish("completed", {})
    everything = "".join(path.read_text("utf-8") for path in tmp_path.iterdir())
    assert "swordfish" not in everything
    assert str(list(PROMPT.encode()))[1:-1] not in everything
    kept = read_run(tmp_path).requests[0]["prompt"]
    assert kept is None if text == "off" else len(kept["sha256"]) == 64


def test_two_runs_of_the_same_text_have_the_same_hash(tmp_path: Path):
    for name in ("a", "b"):
        generate(tmp_path / name, "hash").finish("completed", {})
    hashes = [read_run(tmp_path / name).outputs[0]["token_ids"] for name in ("a", "b")]
    assert hashes[0] == hashes[1]


def test_steps_can_be_sampled_or_left_out(tmp_path: Path):
    generate(tmp_path / "sample", steps="sample", tokens=150).finish("completed", {})
    assert [s["step"] for s in read_run(tmp_path / "sample").steps] == [*range(100), 100, 110, 120, 130, 140]
    generate(tmp_path / "off", steps="off").finish("completed", {})
    assert read_run(tmp_path / "off").steps == []


def test_long_step_files_are_rotated_and_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_module, "_ROTATE", 2000)
    generate(tmp_path, tokens=100).finish("completed", {})
    assert len(list(tmp_path.glob("steps.*.jsonl"))) > 10
    assert [s["step"] for s in read_run(tmp_path).steps] == list(range(100))


def test_secrets_are_hidden_and_token_counts_are_not():
    config = {
        "hf_token": "abc",
        "max_tokens": 5,
        "nested": [{"api_key": "x", "skip_special_tokens": True}],
        "password": None,
    }
    hidden = {"hf_token": "<redacted>", "max_tokens": 5, "password": None}
    shown = ["sampling.max_tokens=5", "engine.max_num_batched_tokens=8,16", "sampling.max_tokens=null"]
    assert redacted(["backend.api_key=x=y", "backend.api_tokens=5a", *shown]) == [
        "backend.api_key=<redacted>",
        "backend.api_tokens=<redacted>",
        *shown,
    ]
    assert redacted({"engine": {"max_num_batched_tokens": 64}}) == {"engine": {"max_num_batched_tokens": 64}}
    assert redacted(config) == hidden | {"nested": [{"api_key": "<redacted>", "skip_special_tokens": True}]}


def test_a_record_without_a_folder_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    record = RunRecord(None)
    record.update(a=1)
    record.finish("completed", {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"record.steps='few'"):
        RunRecord(None, steps="few")


def test_what_is_no_run_folder_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="is no run folder"):
        read_run(tmp_path)


def test_every_sample_of_a_prompt_is_kept_and_shown(tmp_path: Path):
    generate(tmp_path, n=3).finish("completed", {})
    run = read_run(tmp_path)
    page = write_report(tmp_path).read_text("utf-8")
    for index in (0, 1):
        samples = run.samples_of(index)
        assert [sample["sample"] for sample in samples] == [0, 1, 2]
        assert len({tuple(sample["token_ids"]) for sample in samples}) == 3
        assert run.outputs[index] == samples[0]
    assert [page.count(f"answer {sample}</div>") for sample in range(4)] == [2, 2, 2, 0]


def test_the_report_needs_nothing_else_and_shows_texts_as_texts(tmp_path: Path):
    generate(tmp_path).finish("completed", {})
    page = write_report(tmp_path).read_text("utf-8")
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "http://" not in page and "https://" not in page
    assert page.count("<polyline") == 2


def test_the_picture_shows_every_gap_between_tokens(tmp_path: Path):
    generate(tmp_path, tokens=9).finish("completed", {})
    picture = latency_picture(read_run(tmp_path))
    assert picture is not None
    assert [len(curve.points.split()) for curve in picture.curves] == [8, 8]
    generate(tmp_path / "short", tokens=1).finish("completed", {})
    assert latency_picture(read_run(tmp_path / "short")) is None


def test_provenance_is_one_hash_over_all(tmp_path: Path):
    first = Provenance({"weights": lambda: "a", "template": lambda: None}).result()
    second = Provenance({"weights": lambda: "b", "template": lambda: None}).result()
    assert first["hashes"] == {"weights": "a", "template": None}
    assert first["content_hash"] != second["content_hash"]
    assert combined([]) is None and combined(["a"]) == "a" and combined(["a", "b"]) != combined(["b", "a"])
    assert git_state(tmp_path) is None


def test_run_json_is_never_half_written(tmp_path: Path):
    record = RunRecord(tmp_path)
    for i in range(50):
        record.update(number=i)
        assert json.loads((tmp_path / "run.json").read_text())["number"] == i
    assert [path.name for path in tmp_path.glob(".run*")] == []


def test_a_folder_that_holds_a_run_is_not_written_into(tmp_path: Path):
    generate(tmp_path).finish("completed", {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="already holds a run"):
        RunRecord(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
