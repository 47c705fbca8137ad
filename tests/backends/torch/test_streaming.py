"""A model of which only some layers are in memory computes what it computes when all are, and takes no more memory."""

import json
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import PROMPT, STEPS, TOLERANCE, Case, in_company, model_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from xinfer.backends.torch.load import Load
from xinfer.backends.torch.runner import TorchRunner
from xinfer.backends.torch.streaming import LayerStream, StreamPlan
from xinfer.errors import ModelError
from xinfer.models.quantize import Scheme
from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper, cut
from xinfer.testing.tiny import write_folder

NOTHING = Load(lambda name: None)
LAYERS = 3  # of the tiny shapes; in deepseek_v3 they differ in kind, in gemma2 in attention


def first(family: str) -> dict[str, Any]:
    return shape(family, next(iter(SHAPES[family])))


def logits(stepper: Stepper, case: Case) -> list[torch.Tensor]:
    return [each for _, each in in_company(stepper, case)]


@pytest.mark.parametrize("slots", [1, 2, LAYERS])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "phi3"])
def test_logits_are_those_of_resident_layers_bit_for_bit_and_those_of_transformers(
    family: str, slots: int, tmp_path: Path
) -> None:
    case = Case(tmp_path, first(family), write=write_reference, max_len=PROMPT + STEPS)
    assert len(model_of(case.folder).spec.layers) == LAYERS
    ours = case.ours(held={"stream_layers": slots})
    assert ours.runner.info.stream_slots == (slots if slots < LAYERS else 0)
    for streamed, resident in zip(logits(ours, case), logits(case.ours(), case), strict=True):
        assert torch.equal(streamed, resident)
    found = parity(ours, case.reference(), case.prompt(), STEPS, cut(PROMPT, np.random.default_rng(1)))
    assert found.difference <= TOLERANCE
    assert found.first_other_token is None


@pytest.mark.parametrize(
    ("dtype", "determinism", "held"),
    [
        ("bfloat16", "fast", {}),
        ("float32", "invariant", {}),
        ("float32", "fast", {"quantization": Scheme.configured("int8", method="rtn")}),
        ("bfloat16", "fast", {"quantization": Scheme.configured("int4", method="gptq")}),
        ("float32", "fast", {"load_format": "dummy"}),
    ],
    ids=str,
)
def test_it_is_the_same_in_every_form_of_weights(
    dtype: str, determinism: str, held: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(tmp_path, first("qwen3_moe") | {"num_hidden_layers": 5}, write=write_reference)
    resident = logits(case.ours(dtype, determinism, held=held), case)
    for slots in (2, 4):
        streamed = logits(case.ours(dtype, determinism, held=held | {"stream_layers": slots}), case)
        assert all(torch.equal(*pair) for pair in zip(streamed, resident, strict=True))


class Counted(nn.Module):
    """A layer that knows how many of its kind there are."""

    alive: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    def __init__(self, load: Load, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.full((2,), float(index)), requires_grad=False)
        Counted.alive.add(self)

    def forward(self, x: list[int]) -> list[int]:
        return [*x, self.index]


@given(count=st.integers(2, 12), data=st.data())
def test_there_are_never_more_layers_than_slots_and_each_comes_in_its_turn(count: int, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, count - 1))
    most, made = 0, []

    def make(load: Load, index: int) -> Counted:
        nonlocal most
        layer = Counted(load, index)
        made.append(index)
        most = max(most, len(Counted.alive))
        return layer

    stream = LayerStream(make, NOTHING, count, slots, torch.device("cpu"))
    layers = list(stream.modules())
    for _ in range(3):
        x: list[int] = []
        stop = data.draw(st.integers(1, count))  # where a step breaks off
        for layer in layers[:stop]:
            x = layer(x)
            most = max(most, len(Counted.alive))
        assert x == list(range(stop))
    stream.close()
    assert most <= slots
    stay = [layer.index for layer in layers if isinstance(layer, Counted)]
    assert len(stay) == max(0, slots - 2)
    assert all(made.count(index) == 1 for index in stay)
    del stream, layers, layer
    assert not Counted.alive


def test_layers_that_stay_are_spread_and_the_plan_counts_the_others(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", first("llama") | {"num_hidden_layers": 12}, 0)
    spec = model_of(tmp_path / "model").spec
    of_a_layer = sum(np.prod(each) for name, each in spec.tensors.items() if name.startswith("layers.0."))
    plan = StreamPlan.of(spec, 5, lambda _, each: int(np.prod(each)))
    assert plan == (5, 9 * of_a_layer, 2 * of_a_layer)
    stream = LayerStream(Counted, NOTHING, 12, 5, torch.device("cpu"))
    stay = [index for index, layer in enumerate(stream.modules()) if isinstance(layer, Counted)]
    assert stay == [3, 7, 11]
    stream.close()


def test_a_step_that_fails_leaves_the_next_one_right(tmp_path: Path) -> None:
    case = Case(tmp_path, first("llama") | {"num_hidden_layers": 6})
    ours = case.ours(held={"stream_layers": 3})
    assert isinstance(ours.runner, TorchRunner)
    for layer in ours.runner.model.layers:
        hook = layer.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            ours.greedy(case.prompt(), [PROMPT], 1)
        hook.remove()
    assert all(torch.equal(*pair) for pair in zip(logits(ours, case), logits(case.ours(), case), strict=True))


def fail(*_: object) -> None:
    raise RuntimeError("planted")


def test_a_file_that_became_shorter_is_told_and_closing_ends_the_thread(tmp_path: Path) -> None:
    case = Case(tmp_path, first("llama") | {"num_hidden_layers": 4})
    ours = case.ours(held={"stream_layers": 2})
    ours.greedy(case.prompt(), [PROMPT], 1)
    (file,) = case.folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 4)
    with pytest.raises(ModelError, match=rf"{re.escape(str(file))}: ends before byte \d+"):
        ours.greedy(case.prompt(), [PROMPT], 1)
    ours.runner.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("layers")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stream-layers", "0"), "model.stream_layers=0 is out of range: .* has 3 layers, of which 1 to 3"),
        (("--stream-layers", "4"), "model.stream_layers=4 is out of range"),
        (("--stream-layers=-1",), "model.stream_layers=-1 is out of range"),
        (("--stream-layers", "two"), "model.stream_layers"),
        (("--stream-layers", "2", "backend=compile"), "backend compile has all layers in memory: take backend=eager"),
        (("--stream-layers", "2", "backend=onnx"), "backend onnx has all layers in memory: take backend=eager"),
    ],
)
def test_what_cannot_be_streamed_is_refused(xinfer: Any, tmp_path: Path, words: list[str], message: str) -> None:
    write_folder(tmp_path / "model", first("llama"), 0)
    done = xinfer("--model", str(tmp_path / "model"), *words)
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_tells_what_streaming_cost(xinfer: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", first("llama") | {"vocab_size": 300}, 0)
    words = ("--model", str(tmp_path / "model"), "--prompt", "ab", "--max-tokens", "5", "sampling.ignore_eos=true")
    words += ("--seed", "3", "--stream-layers", "2")
    streamed = xinfer(*words, "--json-stats=streamed.json")
    resident = xinfer(*words, "--no-stream", "--json-stats=resident.json")
    assert streamed.stdout == resident.stdout != ""
    stats = json.loads((tmp_path / "resident.json").read_text())
    assert stats["streaming"] is False and stats["stream"] is None
    stats = json.loads((tmp_path / "streamed.json").read_text())
    spec = model_of(tmp_path / "model").spec
    layers = sum(4 * np.prod(each) for name, each in spec.tensors.items() if name.startswith("layers."))
    assert stats["streaming"] is True
    assert stats["stream"]["slots"] == 2
    assert stats["stream"]["bytes_per_step"] == stats["stream"]["bytes_per_token"] == layers
    assert 0 <= stats["stream"]["wait_share"] < 1
    assert "with 2 layers in memory" in streamed.stderr


MEASURED = """
import sys
from pathlib import Path
from xinfer import LLM, SamplingParams

def peak():
    (line,) = (l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

# As much as computing takes by itself, of a model of one layer
llm = LLM(overrides=[f"model.reference={sys.argv[2]}", "engine.kv_memory=4e6", "backend.threads=1"])
llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))
llm.close()
before = peak()
more = sys.argv[3:]
llm = LLM(overrides=[f"model.reference={sys.argv[1]}", "engine.kv_memory=4e6", "backend.threads=1", *more])
llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory was resident")
def test_a_model_four_times_as_large_as_the_memory_that_it_takes(tmp_path: Path) -> None:
    config = first("llama") | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 300}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    write_folder(tmp_path / "large", config | {"num_hidden_layers": 32}, 0)
    write_folder(tmp_path / "small", config | {"num_hidden_layers": 1}, 0)

    def taken(*more: str) -> int:
        folders = (str(tmp_path / "large"), str(tmp_path / "small"))
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *folders, *more], capture_output=True, text=True, check=True
        )
        return int(done.stdout.splitlines()[-1])

    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert taken() > size * 0.9
    assert taken("model.stream_layers=4") < size / 4
