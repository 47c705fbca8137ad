"""A recorded run gives the same tokens again, wherever it lies; what differs is named, and parting texts explained."""

import json
import re
import shutil
from pathlib import Path

import pytest

from xinfer.records.reader import read_run


@pytest.fixture
def recorded(say, tiny_llama: Path, tmp_path: Path):
    """Record a run of two prompts, one of them twice, and return its folder."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    prompts = ["--prompt", "abc", "--prompt", "hello", "--max-tokens", "12", "--seed", "5", "--no-chat"]
    more = ["sampling.n=2", "sampling.logprobs=3", "sampling.frequency_penalty=0.5", "sampling.ignore_eos=true"]
    code, _, said = say("--model", str(model), *prompts, *more)
    assert code == 0, said
    (folder,) = (tmp_path / "outputs").glob("*/*")
    return folder


def edit(folder: Path, change) -> None:
    """Let a function change each line of a run's requests.jsonl; None leaves the line out."""
    path = folder / "requests.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def edit_info(folder: Path, **facts) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_the_same_run_gives_the_same_tokens_and_logprobs(say, recorded: Path, tmp_path: Path):
    code, out, _ = say("replay", "latest")
    assert code == 0
    assert out.splitlines()[1:] == ["identical  4 texts, 48 tokens, logprobs the same bit for bit"]
    (again,) = (folder for folder in (tmp_path / "outputs").glob("*/*") if folder != recorded)
    one, other = read_run(recorded), read_run(again)
    assert [s["token_ids"] for s in one.samples] == [s["token_ids"] for s in other.samples]
    assert other.info["replay"]["same"] == 4 and other.info["config"]["sampling"] == one.info["config"]["sampling"]


def test_a_copy_elsewhere_replays_with_the_model_where_it_is_there(say, recorded: Path, tmp_path: Path, monkeypatch):
    away = tmp_path / "elsewhere"
    shutil.copytree(recorded, away / "run")
    shutil.move(tmp_path / "model", away / "moved")
    monkeypatch.chdir(away)
    code, _, said = say("replay", "run")
    assert code == 2 and "model" in said
    code, out, _ = say("replay", "run", "--model", "moved")
    assert code == 0
    assert "differs  setting model.reference" in out and "hash" not in out
    assert "identical  4 texts" in out


def test_a_hash_that_differs_is_named_and_so_is_a_tokenizer(say, recorded: Path, tmp_path: Path):
    info = json.loads((recorded / "run.json").read_text())
    weights = info["hashes"]["weights"]
    edit_info(recorded, hashes=info["hashes"] | {"weights": ("0" if weights[0] != "0" else "1") + weights[1:]})
    code, out, _ = say("replay", str(recorded))
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("differs")] == [
        f"differs  hash weights: {('0' if weights[0] != '0' else '1') + weights[1:57]}... -> {weights[:57]}..."
    ]


def test_other_settings_and_versions_are_named_before_the_verdict(say, recorded: Path):
    info = json.loads((recorded / "run.json").read_text())
    versions = info["versions"] | {"torch": "1.0"}
    edit_info(recorded, versions=versions, config=info["config"] | {"gone": {"key": 1}})
    code, out, _ = say("replay", str(recorded), "engine.max_num_seqs=1", "backend=onnx")
    lines = out.splitlines()
    assert code == 0
    assert "differs  setting engine.max_num_seqs: 32 -> 1" in lines
    assert "differs  setting backend.name: eager -> onnx" in lines
    assert f"differs  version torch: 1.0 -> {info['versions']['torch']}" in lines
    assert "differs  setting gone: set -> no longer known" in lines
    assert lines[-1].startswith("identical  4 texts, 48 tokens, logprobs at most ")


def test_a_token_that_could_not_have_come_is_a_fault_and_explained(say, recorded: Path):
    def change(line):
        if line["event"] == "output" and line["index"] == 1 and line["sample"] == 1:
            line["token_ids"][7] = 200 if line["token_ids"][7] != 200 else 201
        return line

    edit(recorded, change)
    code, out, _ = say("replay", str(recorded))
    lines = out.splitlines()
    assert code == 1
    assert lines[1].startswith("request 1, sample 1, token 7: ") and lines[1].endswith((" (200)", " (201)"))
    assert lines[2].startswith("  fault: for both to come logits must differ by ")
    assert lines[3].startswith("  u = 0.") and lines[4].startswith("  here ") and lines[5].startswith("  there ")
    assert lines[6].startswith("different  1 texts: 0 part at a near-tie, 1 at a fault; 3 are the same")


def test_another_precision_parts_at_a_near_tie(say, recorded: Path):
    code, out, _ = say("replay", str(recorded), "model.dtype=bfloat16", "sampling.seed=5")
    assert "setting model.dtype: auto -> bfloat16" in out
    if code:  # on some machine all tokens may be the same
        assert "near-tie" in out and "0 at a fault" in out


def test_a_request_goes_on_from_within_its_text(say, recorded: Path):
    whole = read_run(recorded).samples_of(1)[1]
    code, out, _ = say("replay", str(recorded), "--request", "1", "--sample", "1", "--from", "5")
    assert code == 0
    assert "identical  1 texts, 12 tokens, logprobs " in out and whole["text"] in out
    code, out, _ = say("replay", str(recorded), "--request", "1")
    assert code == 0 and "identical  2 texts, 24 tokens" in out and whole["text"] in out


def test_a_run_that_died_is_finished(say, recorded: Path, tmp_path: Path):
    texts = {(s["index"], s["sample"]): s["text"] for s in read_run(recorded).samples}

    def die(line):
        if line["event"] == "request":
            return line
        if line["index"] == 1:
            return None if line["sample"] else line | {"finish_reason": "abort", "token_ids": line["token_ids"][:4]}
        return line

    edit(recorded, die)
    info = json.loads((recorded / "run.json").read_text())
    for name in ("hashes", "content_hash", "git"):
        del info[name]
    (recorded / "run.json").write_text(json.dumps(info | {"status": "running"}))
    code, out, _ = say("replay", str(recorded), "replay.resume=true")
    assert code == 0
    assert "the run ended before it had hashes" in out
    assert "finished  2 texts that the run had not ended" in out
    assert texts[1, 0] in out and texts[1, 1] in out and texts[0, 0] not in out
    code, out, _ = say("replay", str(recorded))
    assert code == 0 and "identical  2 texts" in out
    code, _, said = say("replay", "latest", "replay.resume=true")
    assert code == 2 and "there is nothing to resume" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request", "7"], "--request 7: .* has the requests 0 to 1"),
        (["--from", "3"], "--from 3 is a token of one request"),
        (["--request", "0", "--from", "12"], "--from 12: of request 0 12 tokens are recorded"),
        (["--request", "0", "--sample", "2"], "--sample 2: request 0 has the samples 0 to 1"),
        (["+experiment=reproducible"], "experiment=… can't be laid over a recorded run"),
        (["engine.nonsense=1"], "unknown key 'engine.nonsense'"),
        (["--token", "x"], "why.token"),
    ],
)
def test_what_can_not_be_replayed_is_said(say, recorded: Path, words: list[str], message: str):
    code, out, said = say("replay", str(recorded), *words)
    assert code == 2 and out == ""
    assert re.search(message, said), said


def test_a_record_without_texts_can_not_be_replayed(say, tiny_llama: Path):
    say("--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "3", "record.text=hash")
    code, _, said = say("replay", "latest")
    assert code == 2 and "was recorded with record.text=hash: there are no prompts" in said
