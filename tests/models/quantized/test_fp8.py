"""fp8 weights with a scale for each block or tensor."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from xinfer.errors import ModelError
from xinfer.models.quantized import dequantized
from xinfer.models.weights import Tensors


class Fp8:
    """Draws bytes; what a byte means is told by its sign, exponent and mantissa."""

    def __init__(self, block: tuple[int, int] | None, name: str = "weight_scale_inv", dtype: Any = torch.float32):
        self.block, self.name, self.dtype = block, name, dtype

    def __call__(self, rng: np.random.Generator, out: int, width: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        rows, columns = self.block or (out, width)
        codes = rng.integers(0, 127, (out, width)) + 128 * rng.integers(0, 2, (out, width))  # without NaN
        exponent, mantissa = codes >> 3 & 15, codes & 7
        numbers = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
        numbers = np.where(codes > 127, -numbers, numbers).astype(np.float32)
        scales = rng.uniform(1e-4, 1e-3, (-(-out // rows), -(-width // columns))).astype(np.float32)
        scales = torch.from_numpy(scales).to(self.dtype)
        by_element = scales.float().numpy()[np.arange(out)[:, None] // rows, np.arange(width) // columns]
        stored = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
        scales = scales if self.block else scales.flatten()
        return {"weight": stored, self.name: scales}, numbers * by_element


def config(**changes: Any) -> dict[str, Any]:
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 16]}
    return fields | changes


@pytest.mark.parametrize("block", [(128, 128), (32, 16), (48, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_exact_also_where_the_last_is_smaller(block: Any, dtype: Any, checkpoint: Any) -> None:
    checkpoint(Fp8(block, dtype=dtype), config(weight_block_size=list(block))).check()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_are_those_of_transformers(dtype: torch.dtype) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = {"a.weight": weight, "a.weight_scale_inv": torch.arange(1.0, 7.0).view(2, 3) / 7}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    ours = dequantized(source, config(weight_block_size=[128, 128])).load("a.weight")
    theirs = Fp8Dequantize(None)._dequantize_one(weight, stored["a.weight_scale_inv"], torch.float32)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_one_scale_for_a_tensor(name: str, checkpoint: Any) -> None:
    written = checkpoint(Fp8(None, name), config(weight_block_size=None, activation_scheme="static"))
    written.check()
    for part in ("input_scale", "activation_scale"):
        written.stored[f"model.layers.0.mlp.up_proj.{part}"] = torch.ones(1)
    written.stored["model.layers.0.mlp.down_proj." + name] = written.stored["model.layers.0.mlp.down_proj." + name][0]
    written.save()
    written.check()


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_any_shape_and_block_is_read_exactly(out: int, width: int, rows: int, columns: int, seed: int) -> None:
    parts, weight = Fp8((rows, columns))(np.random.default_rng(seed), out, width)
    stored = {f"a.{name}": part for name, part in parts.items()}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    found = dequantized(source, config(weight_block_size=[rows, columns]))
    assert found.shapes == {"a.weight": (out, width)}
    np.testing.assert_array_equal(found.load("a.weight").numpy(), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_scheme": "other"}, "activation_scheme='other'"),
        *(({"weight_block_size": size}, "weight_block_size=") for size in (0, 32, [32], [0, 1], [1.0, 2], ["1", 2])),
        ({"weight_block_size": None}, r"weight_scale_inv' has the shape \[2, 8\].*\[1\]"),
        ({"weight_block_size": [64, 16]}, "weight_scale_inv' has the shape"),
    ],
)
def test_a_config_that_does_not_fit_is_named(changes: dict[str, Any], message: str, checkpoint: Any) -> None:
    with pytest.raises(ModelError, match=message):
        checkpoint(Fp8((32, 16)), config(**changes)).model().weights  # noqa: B018


def test_a_weight_whose_scales_are_missing_or_odd_is_named(checkpoint: Any) -> None:
    written = checkpoint(Fp8((32, 16)), config())
    name = "model.layers.1.mlp.up_proj.weight"
    scale = written.stored[name + "_scale_inv"]
    written.stored[name + "_scale_inv"] = scale.to(torch.int32)
    written.save()
    with pytest.raises(ModelError, match=f"{name}_scale_inv' holds int32"):
        written.model().weights.load("layers.1.mlp.up.weight")
    del written.stored[name + "_scale_inv"]
    written.save()
    with pytest.raises(ModelError, match=f"{name}' holds float8_e4m3fn, but none of fp8's scales"):
        written.model().weights.load("layers.1.mlp.up.weight")
    del written.stored[name]
    written.stored[name + "_scale_inv"] = scale
    written.save()
    with pytest.raises(ModelError, match=f"lacks '{name}'"):
        written.model().weights  # noqa: B018


def test_a_weight_in_another_type_than_fp8_is_named(checkpoint: Any) -> None:
    written = checkpoint(Fp8((32, 16)), config())
    name = "model.layers.1.mlp.up_proj.weight"
    written.stored[name] = written.stored[name].float()
    written.save()
    with pytest.raises(ModelError, match=f"{name}' holds float32, but float8_e4m3fn or float8_e5m2"):
        written.model().weights.load("layers.1.mlp.up.weight")
