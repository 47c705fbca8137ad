"""Weights with an adapter are those that PEFT merges, whatever the family and the format of the base."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from xinfer import LLM
from xinfer.backends import BackendContext
from xinfer.backends.torch.runner import TorchRunner
from xinfer.config import compose
from xinfer.engine.types import Limits
from xinfer.errors import ConfigError, ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.lora import Adapter, find_adapter
from xinfer.models.lora_config import parse_lora
from xinfer.models.model import Model
from xinfer.models.names import Names
from xinfer.plugins import load_plugins
from xinfer.session import Session
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf

SEED = 5
ATOL = 2e-6  # of weights around 1: a product of a few ranks, added up in another order


def model(path: Path, adapter: Path | None = None, scale: float = 1.0, **options: Any) -> Model:
    found = None if adapter is None else lambda: Adapter(adapter, scale)
    return Model(str(path), lambda: path, xinfer_model_families(), adapter=found, **options)


def read_all(found: Model) -> dict[str, Tensor]:
    return {name: found.weights.load(name) for name in found.weights}


def make(base: Any, folder: Path, **wanted: Any) -> Any:
    """Save an adapter with random weights as PEFT does, and return PEFT's model of it."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, **wanted}))
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.data *= torch.empty_like(parameter).uniform_(0.5, 2, generator=generator)
            elif parameter.requires_grad:
                parameter.data.normal_(0, 0.3, generator=generator)
        adapted.save_pretrained(folder)
    return adapted


def merged(adapted: Any, base: Path, folder: Path) -> Path:
    """Write what PEFT merges as a model folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.merge_and_unload().save_pretrained(folder)
    shutil.copy(base / "config.json", folder / "config.json")
    return folder


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=ATOL, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "llama": ("llama", "llama3", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "rslora": ("llama", "llama3", {"target_modules": ["q_proj"], "use_rslora": True}),
    "patterns": (
        "llama",
        "llama3",
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"q_proj": 2, r"model\.layers.1.self_attn.v_proj": 7, "^model.layers.0.mlp.down_proj": 3},
            "alpha_pattern": {"k_proj": 11, "layers.2.self_attn.v_proj": 5, r".*\.o_proj": -1},
        },
    ),
    "some layers": ("llama", "llama3", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "bias": ("llama", "plain", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}),
    "biases": ("llama", "plain", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "all biases": ("llama", "plain", {"target_modules": ["q_proj"], "bias": "all"}),
    "embedding": ("llama", "plain", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "saved": ("llama", "plain", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "tied": ("llama", "linear", {"target_modules": ["embed_tokens", "v_proj"]}),
    "tied, saved": (
        "llama",
        "linear",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "fused": ("phi3", "usual", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "transposed": ("gpt2", "usual", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "transposed, not said": ("gpt2", "wide", {"target_modules": ["c_attn"]}),
    "latent": ("deepseek_v3", "usual", {"target_modules": ["kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa"]}),
    "experts' attention": ("qwen3_moe", "usual", {"target_modules": ATTENTION}),
    "gemma": ("gemma2", "usual", {"target_modules": "all-linear"}),
    "dora": ("llama", "llama3", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "dora, fused": ("phi3", "usual", {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "dora, transposed": ("gpt2", "usual", {"target_modules": ["c_attn", "c_fc"], "use_dora": True}),
    "dora, latent": ("deepseek_v3", "usual", {"target_modules": ["kv_b_proj"], "use_dora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_peft_merges(case: str, tmp_path: Path) -> None:
    family, kind, wanted = CASES[case]
    base = tmp_path / "base"
    adapted = make(write_reference(base, shape(family, kind), SEED), tmp_path / "adapter", **wanted)
    found, plain = read_all(model(base, tmp_path / "adapter")), read_all(model(base))
    same(found, read_all(model(merged(adapted, base, tmp_path / "merged"))))
    changed = [name for name in plain if not torch.equal(plain[name], found[name])]
    assert 0 < len(changed) < len(plain)
