"""An audit raises no false alarm in float32, and names what is planted: a spoilt block, a wrong guess that is kept."""

import json
import re
from pathlib import Path

import pytest
import torch

from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.sampler import Choice, Drawn, Sampler

QUICK = "audit.only=[again,prefix_cache,chunking,batch_size,preemption,speculation,streaming]"


@pytest.fixture
def audit(say, tiny_llama: Path, tmp_path: Path):
    """Run the audit of the tiny model; returns (exit code, its findings by name, standard output)."""

    def call(*words: str):
        code, out, said = say("audit", "--model", str(tiny_llama), "audit.prompts=3", "audit.tokens=12", *words)
        files = list(tmp_path.glob("outputs/*/*/audit.json"))
        assert code in (0, 1) and files, said
        found = {each["name"]: each for each in json.loads(files[-1].read_text())}
        return code, found, out

    return call


def test_nothing_changes_tokens_in_float32_and_everything_happened(audit):
    code, found, out = audit(QUICK)
    assert code == 0
    names = ["again", "prefix_cache", "chunking", "batch_size", "preemption", "speculation", "streaming"]
    assert list(found) == ["as configured", *names]
    for name, each in found.items():
        assert each["verdict"] in ("identical", "near-tie"), (name, each)
        assert each["texts"] == 12 and name in out
    numbers = {name: [int(each) for each in re.findall(r"\d+", found[name]["note"])] for name in names[1:-1]}
    assert numbers["prefix_cache"][0] == 0 < numbers["prefix_cache"][1]
    assert all(there > usual for name, (there, usual) in numbers.items() if name != "prefix_cache")


def test_a_spoilt_block_of_the_cache_is_found(audit, monkeypatch):
    forward, calls = TorchRunner.forward, []

    @torch.inference_mode()
    def spoiling(self, batch):
        calls.append(1)
        if len(calls) == 14:  # the first time around takes 13
            self.pools[0][:64].copy_(self.pools[0][64:128])
        return forward(self, batch)

    monkeypatch.setattr(TorchRunner, "forward", spoiling)
    code, found, out = audit("audit.only=[prefix_cache]")
    assert code == 1
    assert found["as configured"]["verdict"] == "wrong" and found["prefix_cache"]["verdict"] == "identical"
    assert "wrong" in out


def test_a_guess_that_is_kept_though_it_is_wrong_is_found(audit, monkeypatch):
    draw = Sampler.draw

    def believing(self, logits, sequences):
        drafts, drawn = [s.draft[:1] for s in sequences], draw(self, logits, sequences)
        choices = [Choice(d[0], c.logprobs) if d else c for c, d in zip(drawn.read(), drafts, strict=True)]
        return Drawn(drawn.tokens, lambda tokens: choices)

    monkeypatch.setattr(Sampler, "draw", believing)
    code, found, out = audit("audit.only=[chunking,speculation]")
    assert code == 1
    assert found["speculation"]["verdict"] == "wrong" and found["chunking"]["verdict"] == "identical"
    assert re.search(r"^speculation:\nrequest \d+, token \d+: .* instead of ", out, re.MULTILINE)
    assert "  fault: for both to come logits must differ by" in out


def test_a_step_that_is_a_little_off_is_found_by_its_logprobs(audit, monkeypatch):
    """Tokens may be the same although something is wrong."""
    forward = TorchRunner.forward

    def off(self, batch):
        logits = forward(self, batch)
        return logits * 1.01 if len(batch.context_lens) == 1 else logits

    monkeypatch.setattr(TorchRunner, "forward", off)
    code, found, _ = audit("audit.only=[again,batch_size]")
    assert code == 1
    assert found["batch_size"]["verdict"] == "wrong" and found["again"]["verdict"] == "identical"
    assert found["batch_size"]["logprobs"] > 1e-3


@pytest.mark.slow
def test_compiled_and_shared_out_tokens_are_the_same(audit, tiny_llama: Path):
    code, found, _ = audit("audit.only=[compile,tensor_parallelism,cuda_graphs]", "engine.max_model_len=256")
    assert code == 0
    assert found["compile"]["verdict"] in ("identical", "near-tie")
    assert found["tensor_parallelism"]["verdict"] in ("identical", "near-tie"), found["tensor_parallelism"]
    assert found["cuda_graphs"]["verdict"] == "not tried"


def test_what_made_no_difference_is_not_called_identical(audit):
    _, found, _ = audit("audit.only=[prefix_cache,batch_size]", "engine.max_num_seqs=1", "record.text=hash")
    assert found["batch_size"]["verdict"] == "not tried"
    assert re.fullmatch(r"it made no difference here: (\d+) steps, as configured \1", found["batch_size"]["note"])


def test_what_can_not_be_tried_says_why(audit):
    code, found, out = audit("audit.only=[compile,cuda_graphs,streaming]", "backend=onnx")
    assert code == 0
    assert {name: each["verdict"] for name, each in found.items() if name != "as configured"} == dict.fromkeys(
        ("compile", "cuda_graphs", "streaming"), "not tried"
    )
    assert "backend onnx has all layers in memory" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit.only=[chunks]"], r"audit.only names 'chunks', which is unknown \(did you mean 'chunking'\?\)"),
        (["audit.tokens=0"], "audit.tokens=0 is out of range"),
    ],
)
def test_what_can_not_be_audited_is_said(say, tiny_llama: Path, words: list[str], message: str):
    code, out, said = say("audit", "--model", str(tiny_llama), *words)
    assert code == 2 and out == ""
    assert re.search(message, said), said
