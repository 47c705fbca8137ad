"""A model's config is enough to run it on random weights, which depend on nothing but the config and a seed."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Limits
from xinfer.models.dummy import byte_tokenizer
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper


def model(folder: Path, family: str, seed: int = 0) -> Model:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape(family, SHAPES[family][0])))
    return Model("dummy", lambda: folder, xinfer_model_families(), load_format="dummy", dummy_seed=seed)


def logits(model: Model) -> torch.Tensor:
    runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), Limits(kv_memory=1e7)))
    return Stepper(runner).greedy(range(3, 40), [37], 4)[1]


@pytest.mark.parametrize("family", SHAPES)
def test_every_family_runs_on_random_weights(family: str, tmp_path: Path) -> None:
    found = logits(model(tmp_path, family))
    assert found.isfinite().all()
    assert 0.05 < found.std() < 20


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = (model(tmp_path, "mixtral", seed).weights for seed in (7, 7, 8))
    names = list(first)
    values = {name: first.load(name) for name in names}
    for name in reversed(names):
        assert torch.equal(again.load(name), values[name])
        learned = values[name].unique().numel() > 1
        assert torch.equal(other.load(name), values[name]) != learned


@given(st.text())
def test_without_a_tokenizer_ids_are_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_the_command_line_needs_no_checkpoint(xinfer, tmp_path: Path) -> None:
    folder = tmp_path / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape("qwen3_moe", "usual") | {"vocab_size": 256}))
    arguments = (
        "--model",
        str(folder),
        "model.load_format=dummy",
        "--no-chat",
        "--prompt",
        "Hi",
        "--max-tokens",
        "4",
        "--seed",
        "7",
    )
    runs = [xinfer(*arguments, f"model.dummy_seed={seed}") for seed in (1, 1, 2)]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout != runs[2].stdout
