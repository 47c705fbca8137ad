"""MXFP4 experts, against the format's words and against transformers' own conversion."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Limits
from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantized import dequantized, describe
from xinfer.models.weights import Tensors
from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.stepper import Stepper

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def stored(experts: int, out: int, groups: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (experts, out, groups, 16), dtype=torch.uint8, generator=generator),
        f"{NAME}_scales": torch.randint(100, 140, (experts, out, groups), dtype=torch.uint8, generator=generator),
        f"{NAME}_bias": torch.ones(experts, out, dtype=torch.bfloat16),
    }


def tensors(parts: dict[str, torch.Tensor]) -> Tensors:
    return Tensors({name: tuple(part.shape) for name, part in parts.items()}, parts.__getitem__, ())


def value(nibble: int) -> float:
    """What e2m1 means: a sign, two bits of exponent with the bias 1, one of mantissa; without exponent, subnormal."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    number = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
    return -number if sign else number


def test_every_byte_and_scale_means_what_the_format_says() -> None:
    parts = stored(1, 255, 16)
    parts[f"{NAME}_blocks"] = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    parts[f"{NAME}_scales"] = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    found = dequantized(tensors(parts), CONFIG).load(NAME)
    assert found.shape == (1, 512, 255)
    for scale in range(255):
        expected = [math.ldexp(value(n), scale - 127) for byte in range(256) for n in (byte & 15, byte >> 4)]
        with np.errstate(over="ignore"):  # 3 * 2**127 is infinite in float32
            np.testing.assert_array_equal(found[0, :, scale].numpy(), np.array(expected).astype(np.float32))


@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 4), st.integers(0, 99))
def test_experts_are_those_of_transformers(experts: int, out: int, groups: int, seed: int) -> None:
    parts = stored(experts, out, groups, seed)
    found = dequantized(tensors(parts), CONFIG)
    assert found.shapes == {NAME: (experts, groups * 32, out), f"{NAME}_bias": (experts, out)}
    theirs = convert_moe_packed_tensors(parts[f"{NAME}_blocks"], parts[f"{NAME}_scales"], dtype=torch.float32)
    assert torch.equal(found.load(NAME), theirs)
    assert torch.equal(found.load(f"{NAME}_bias"), parts[f"{NAME}_bias"])


def test_it_is_told_what_they_are() -> None:
    assert describe(CONFIG) == "MXFP4 experts"


def test_parts_that_do_not_fit_are_named() -> None:
    for part, change, message in (
        ("blocks", lambda t: t[..., :8], "blocks' has the shape"),
        ("blocks", lambda t: t[0], "blocks' has the shape"),
        ("scales", lambda t: t[:, :1], "scales' has the shape"),
        ("scales", lambda t: t[..., None], "scales' has the shape"),
        ("scales", lambda t: torch.full_like(t, 255), "NaN"),
        ("scales", lambda t: t.float(), "holds float32"),
    ):
        parts = stored(2, 4, 2)
        parts[f"{NAME}_{part}"] = change(parts[f"{NAME}_{part}"])
        with pytest.raises(ModelError, match=f"{NAME}.*{message}"):
            dequantized(tensors(parts), CONFIG).load(NAME)
    parts = stored(2, 4, 2)
    del parts[f"{NAME}_scales"]
    with pytest.raises(ModelError, match=f"lacks '{NAME}_scales'"):
        dequantized(tensors(parts), CONFIG)


def test_a_gpt_oss_as_it_is_published_computes_what_transformers_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    config = {**shape("gpt_oss", "usual"), **sizes}
    model = write_reference(tmp_path, config, seed=5)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("_proj") or "attn" in name}
    generator = torch.Generator().manual_seed(5)
    experts, weights = config["num_local_experts"], model.model.layers[0].mlp.experts
    for part, out, into in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        blocks = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (experts, out, into // 32), dtype=torch.uint8, generator=generator)
        kept |= {f"model.layers.0.mlp.experts.{part}_{kind}": x for kind, x in (("blocks", blocks), ("scales", scales))}
        getattr(weights, part).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(kept, file, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    found = Model(str(tmp_path), lambda: tmp_path, xinfer_model_families())
    runner = TorchRunner(BackendContext(found, EagerConfig(device="cpu"), Limits(kv_memory=1e7)))
    compared = parity(Stepper(runner), model, list(range(40)), 8)
    assert compared.difference <= 1e-4 * max(1, compared.spread)
    assert compared.spread >= 1
