"""`python -m xinfer runs`: what its words mean, what it prints where, and that nothing but the index is written."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from xinfer.cli import run
from xinfer.flags import parse
from xinfer.records.reader import read_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the task in this process, in an empty folder; returns (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xinfer"])

    def call(*words: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        code = run(["runs", *words])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def two(tmp_path: Path, write_run) -> None:
    slow = {"requests": 1, "generated_tokens": 64, "tpot_ms": 20.0, "output_tok_s": 40.0, "peak_memory_bytes": 3 << 30}
    older = tmp_path / "outputs/2026-11-01/10-00-00-aa11"
    write_run(older, slow, ["sampling.seed=7"], started="2026-11-01T00:00:00+00:00")
    fast = slow | {"tpot_ms": 5.0, "output_tok_s": 90.0, "percentiles": {"tpot_ms": {"p99": 6.0}}}
    config = {"backend": {"name": "onnx"}, "model": {"quantization": "int4"}, "record": {"text": "full"}}
    write_run(
        tmp_path / "outputs/sweeps/2026-11-02/10-00-00-bb22/0",
        fast,
        ["backend=onnx"],
        started="2026-11-02T00:00:00+00:00",
        config=config,
        versions={"torch": "2.12.0"},
        hashes={"weights": "xyz"},
        git={"commit": "cafe", "dirty": True},
    )


def test_the_newest_runs_are_listed_a_line_each(runs, two):
    code, out, err = runs()
    assert (code, err) == (0, "")
    first, second = (line.split() for line in out.splitlines() if "outputs/" in line)
    assert first[0] == "outputs/sweeps/2026-11-02/10-00-00-bb22/0"
    assert first[3:] == ["completed", "generate", "Tiny-Llama", "onnx", "float32", "int4", "1", "64", "200", "90", "7"]
    assert second[3:] == ["completed", "generate", "Tiny-Llama", "eager", "float32", "1", "64", "50", "40", "7"]


def test_words_search_and_keys_sort_and_limit(runs, two):
    def listed(*words: str) -> list[str]:
        code, out, _ = runs(*words, "--json")
        assert code == 0
        return [Path(one["folder"]).name for one in json.loads(out)]

    assert listed("onnx") == ["0"]
    assert listed("backend=eager") == ["10-00-00-aa11"]
    assert listed("model=tiny", "tok_s>100") == ["0"]
    assert listed("sampling.seed=7") == ["10-00-00-aa11"]
    assert listed("runs.sort=tok_s") == ["10-00-00-aa11", "0"]
    assert listed("runs.limit=1", "since=2026-11-01") == ["0"]
    assert listed("runs.folder=outputs/2026-11-01") == ["10-00-00-aa11"]
    assert listed("status=failed") == []
    assert "1 of 2; runs.limit=null lists all" in runs("runs.limit=1")[1]
    assert "no run under outputs/ is like that" in runs("nothing")[1]


def test_only_this_task_takes_words_with_an_equals_sign_but_its_own_keys():
    words = ["runs", "model=a,b", "tok_s>5", "it's", "runs.limit=3", "--json", "log.level=debug"]
    assert parse(words).overrides == [
        *("task=runs", "runs.limit=3", "json='true'", "log.level=debug"),
        r"runs.words=['model=a,b','tok_s>5','it\'s']",
    ]
    assert parse(["explain", "x", "model=smollm2"]).overrides == ["task=explain", "run=x", "model=smollm2"]


def test_a_run_is_shown_with_all_that_tells_it_apart(runs, two):
    code, out, err = runs("show", "bb22/0")
    assert (code, err) == (0, "")
    for expected in (
        "outputs/sweeps/2026-11-02/10-00-00-bb22/0",
        "onnx float32 int4, on cpu",
        "backend=onnx",
        "weights hash",
        "xyz",
        "cafe, changed",
        "3.00 GiB",
        "replay  python -m xinfer replay outputs/sweeps/2026-11-02/10-00-00-bb22/0",
    ):
        assert expected in out
    assert runs("show")[1] == runs("show", "latest")[1] == out
    plain = json.loads(runs("show", "aa11", "--json")[1])
    assert plain["figures"]["tok_s"] == 50.0
    assert plain["hashes"] == {"weights": "abc"}
    assert plain["replay"] == "python -m xinfer replay outputs/2026-11-01/10-00-00-aa11"


def test_runs_are_compared_with_the_first_and_every_difference_is_named(runs, two):
    code, out, _ = runs("compare", "aa11", "bb22")
    assert code == 0
    cells = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert cells["tpot_ms"] == ["20", "5", "0.250"]
    assert cells["tok_s"] == ["50", "200", "4.000"]
    assert cells["backend.name"] == ["eager", "onnx"]
    assert cells["model.quantization"] == ["None", "int4"]
    assert cells["torch"] == ["2.13.0", "2.12.0"]
    assert cells["weights"] == ["abc", "xyz"]
    assert cells["commit"] == ["None", "cafe"]
    assert "record.text" not in cells and "hardware" not in out
    plain = json.loads(runs("compare", "aa11", "bb22", "--json")[1])
    assert {kind: sorted(rows) for kind, rows in plain["differences"].items()} == {
        "configuration": ["backend.name", "model.quantization"],
        "versions": ["torch"],
        "hashes": ["weights"],
        "code": ["commit", "dirty"],
    }
    assert {"name": "tpot_ms", "values": [20.0, 5.0], "ratios": [1.0, 0.25]} in plain["figures"]


def test_a_run_is_the_same_as_itself(runs, two):
    assert "nothing differs" in runs("compare", "aa11", "aa11")[1]


def test_folders_that_cannot_be_read_are_named_and_the_rest_is_listed(runs, two, tmp_path: Path):
    (tmp_path / "outputs/broken").mkdir()
    (tmp_path / "outputs/broken/run.json").write_text("{")
    code, out, err = runs()
    assert code == 0 and "aa11" in out and "bb22" in out
    assert "outputs/broken" in err and "run.json is damaged" in err and len(err.splitlines()) == 1


def test_nothing_is_written_but_the_index(runs, two, tmp_path: Path):
    before = set(tmp_path.rglob("*"))
    for words in ((), ("show",), ("compare", "aa11", "bb22"), ("show", "nowhere")):
        runs(*words)
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "outputs/.index.sqlite"}


def test_without_any_run_there_is_nothing_to_list(runs, tmp_path: Path):
    code, out, _ = runs()
    assert (code, out.strip()) == (0, "there is no outputs/ yet")
    assert runs("--json")[1].strip() == "[]"
    assert list(tmp_path.iterdir()) == []


BAD = [
    (["show", "nowhere"], "nowhere is no run's folder, and part of none"),
    (["show", "10-00-00"], "10-00-00 is part of 2 runs' folders (outputs/"),
    (["compare", "aa11"], "compare needs two runs or more"),
    (["tok>5"], "no run has a figure 'tok' (did you mean 'tok_s'?)"),
    (["since=tomorrow"], "'since=tomorrow' is no date"),
    (["runs.sort=sped"], "runs.sort='sped'"),
    (["runs.limit=0"], "runs.limit=0 is out of range"),
    (["runs.limti=1"], "unknown key 'runs.limti' (did you mean 'runs.limit'"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_clear_line(runs, two, words: list[str], message: str):
    code, out, err = runs(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1, err


def test_the_shown_command_replays_a_recorded_run(runs, tiny_llama: Path, tmp_path: Path, capfd):
    GlobalHydra.instance().clear()
    words = ["--model", str(tiny_llama), "--prompt", "it's a", "--max-tokens", "6", "sampling.temperature=1.5"]
    assert run(words) == 0
    capfd.readouterr()
    command = json.loads(runs("show", "--json")[1])["replay"]
    GlobalHydra.instance().clear()
    assert run(shlex.split(command)[3:]) == 0
    assert "identical  1 texts, 6 tokens" in capfd.readouterr().out
    first, second = (read_run(file.parent) for file in tmp_path.rglob("run.json"))
    assert first.outputs[0]["token_ids"] == second.outputs[0]["token_ids"]


def test_another_tasks_command_is_its_own(runs, write_run, tmp_path: Path):
    write_run(tmp_path / "outputs/a", {}, ["task=bench", "backend=onnx"], task="bench")
    assert json.loads(runs("show", "--json")[1])["replay"] == "python -m xinfer task=bench backend=onnx"
    write_run(tmp_path / "outputs/a", {}, config={"record": {"text": "hash"}})
    assert json.loads(runs("show", "--json")[1])["replay"] is None
