"""Two sides over the same tokens: figures are those of a plain computation, a planted fault is named by its layer."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from xinfer.flags import parse
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.windows import windows
from xinfer.records.reader import read_run


@pytest.fixture
def models(tiny_llama: Path, tmp_path: Path):
    """Two folders of the same model, in one of which a matrix of the second layer is off."""
    good, bad = (shutil.copytree(tiny_llama, tmp_path / name) for name in ("good", "bad"))
    (file,) = bad.glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    return good, bad


def report(root: Path) -> dict:
    (file,) = root.glob("outputs/*/*/diff.json")
    return json.loads(file.read_text())


def test_a_side_is_the_same_as_itself(say, models):
    code, out, _ = say("diff", "eager", "eager", "--model", str(models[0]), "diff.tokens=20", "diff.texts=2")
    assert code == 0 and out.count("\n") == 1
    assert "divergence 0 nats a token; the other way 0; likeliest token the same at 100.00% of 40 places" in out
    assert (
        "the same token taken everywhere; no layer further apart than float32 rounds (0 of its size at the end)" in out
    )


def test_two_backends_agree_in_float32(say, models):
    code, out, _ = say("diff", "eager", "onnx", "--model", str(models[0]), "diff.tokens=20", "diff.max_kl=1e-6")
    assert code == 0
    assert "100.00%" in out and "no layer further apart than float32 rounds" in out


def test_figures_are_those_of_transformers_and_a_fault_is_named_by_its_layer(say, models, tmp_path: Path):
    good, bad = models
    words = ["--model", str(good), f"b.model.reference={bad}", "diff.tokens=30", "diff.texts=3"]
    code, out, _ = say("diff", "eager", "eager", *words)
    assert code == 0
    assert "layer 1 is the first that is off by more than the precision rounds" in out and "steepest at layer 1" in out
    found = report(tmp_path)
    places = found["places"]
    read = Model(str(good), lambda: good, xinfer_model_families())
    first = [int(window[0]) for window in windows(read, 30, 3)]  # which no place has as its next
    width = read.tokenizer.max_token_id + 1  # ids beyond it mean nothing
    kl, other, nll, same, largest = [], [], [], [], 0.0
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (good, bad)]
    for text in range(3):
        tokens = [first[text], *(p["token_id"] for p in places if p["text"] == text and p["token_id"] is not None)]
        with torch.inference_mode():
            rows = [model(torch.tensor([tokens])).logits[0, :, :width].double() for model in models]
        p, q = (each.log_softmax(1).numpy() for each in rows)
        kl += (np.exp(p) * (p - q)).sum(1).tolist()
        other += (np.exp(q) * (q - p)).sum(1).tolist()
        nll += [-p[i, token] for i, token in enumerate(tokens[1:])]
        same += (p.argmax(1) == q.argmax(1)).tolist()
        largest = max(largest, float((rows[0] - rows[1]).abs().max()))
    figures = found["figures"]
    assert figures["places"] == len(kl) == 90
    assert figures["kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert figures["kl_reverse"] == pytest.approx(np.mean(other), rel=1e-3)
    assert figures["top1"] == pytest.approx(np.mean(same))
    assert figures["largest_difference"] == pytest.approx(largest, rel=1e-3)
    assert figures["perplexity_a"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert [place["kl"] for place in places] == pytest.approx(kl, rel=1e-2, abs=1e-6)
    page = next(tmp_path.glob("outputs/*/*/diff.html")).read_text()
    assert page.count("<circle") >= 90 and "http" not in page


def test_a_run_is_compared_over_its_own_texts_by_what_it_drew(say, models, tmp_path: Path):
    good, bad = models
    prompts = ["--prompt", "abc", "--prompt", "hello", "--no-chat", "--max-tokens", "16", "--seed", "3"]
    assert say("--model", str(good), *prompts, "sampling.repetition_penalty=1.3", "sampling.ignore_eos=true")[0] == 0
    (folder,) = tmp_path.glob("outputs/*/*")
    run = read_run(folder)
    code, out, _ = say(
        "diff", str(folder), "eager", f"b.model.reference={bad}", "--model", str(good), "diff.layers=false"
    )
    assert code == 0
    places = report(tmp_path)["places"]
    for index in (0, 1):
        drawn = [p["chosen"][0] for p in places if p["text"] == index and p["token_id"] is not None]
        assert drawn == run.outputs[index]["token_ids"]
    parting = next((p for p in places if p["chosen"][0] != p["chosen"][1]), None)
    assert parting is not None and f"first other token at request {parting['text']}, {parting['at']}: " in out


def test_prompts_are_answered_by_the_first_side(say, models, tmp_path: Path):
    words = ["--model", str(models[0]), "--prompt", "abc", "--max-tokens", "8", "--temperature", "0", "--no-chat"]
    assert say(*words, "sampling.ignore_eos=true")[0] == 0
    expected = read_run(next(tmp_path.glob("outputs/*/*"))).outputs[0]["token_ids"]
    assert say("diff", "eager", "eager", *words, "sampling.ignore_eos=true")[0] == 0
    assert [p["token_id"] for p in report(tmp_path)["places"] if p["token_id"] is not None] == expected


def test_thresholds_make_it_a_check(say, models):
    good, bad = models
    sides = ["diff", "eager", "eager", "--model", str(good), f"b.model.reference={bad}", "diff.tokens=20"]
    code, out, _ = say(*sides, "diff.max_kl=1e-9", "diff.min_top1=1", "diff.max_difference=1e-6", "record=none")
    assert code == 1
    assert re.search(r"^fails: \S+ is above diff.max_kl=1e-09$", out, re.MULTILINE)
    assert re.search(r"^fails: \S+ is above diff.max_difference=1e-06$", out, re.MULTILINE)
    assert say(*sides, "diff.max_kl=100", "diff.min_top1=0", "record=none")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["eager", "nowhere"],
            "'nowhere' is no backend .*, and as a run: nowhere is no run's folder, and part of none",
        ),
        (["eager", "eager", "b.nonsense=1"], "unknown key 'nonsense'"),
        (["eager", "eager", "diff.max_kl=-1"], "diff.max_kl=-1.0 is out of range"),
        (["eager", "eager", "diff.tokens=1"], "diff.tokens=1 is out of range"),
        (["eager", "latest"], "there is no such run under outputs/ yet"),
    ],
)
def test_what_can_not_be_compared_is_said(say, models, words: list[str], message: str):
    code, out, said = say("diff", *words, "--model", str(models[0]))
    assert code == 2 and out == ""
    assert re.search(message, said), said


def test_what_is_different_of_a_side_is_one_list_for_hydra():
    line = parse(["diff", "eager", "onnx", "b.model.quantization=int4", "b.backend.providers=[a,b]", "a.x='y z'"])
    assert line.overrides[-2:] == [
        r"diff.a_overrides=['x=\'y z\'']",
        "diff.b_overrides=['model.quantization=int4','backend.providers=[a,b]']",
    ]
