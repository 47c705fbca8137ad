"""compressed-tensors, written by a packer of our tests and, where it is installed, by the package itself."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.errors import ModelError
from xinfer.models.quantized import dequantized, describe
from xinfer.models.weights import Tensors


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row of codes as a stream of bits, the lowest first, in words of 32."""
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


@dataclass
class Compressed:
    """Draws integers, scales and zero points for a strategy."""

    bits: int = 4
    strategy: str = "group"
    size: int = 32
    symmetric: bool = True
    packed: bool = True
    reordered: bool = False
    packed_zeros: bool = True

    def __call__(self, rng: np.random.Generator, out: int, width: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        half = 2 ** (self.bits - 1)
        group = np.arange(width) // (self.size if self.strategy == "group" else width)
        rows = 1 if self.strategy == "tensor" else out
        shape = (rows, int(group[-1]) + 1)
        if self.reordered:
            group = rng.permutation(group)
        numbers = rng.integers(-half, half, (out, width))
        scales = rng.uniform(0.1, 0.3, shape).astype(np.float16) / np.float16(half)
        zeros = np.zeros(shape, int) if self.symmetric else rng.integers(-half, half, shape)
        of_row = np.arange(out) if rows > 1 else np.zeros(out, int)
        weight = (numbers - zeros[of_row][:, group]).astype(np.float32) * scales.astype(np.float32)[of_row][:, group]
        parts = {"weight_scale": scales if self.strategy != "tensor" else scales.reshape(1)}
        if self.packed:
            parts |= {"weight_packed": words(numbers + half, self.bits), "weight_shape": np.array([out, width])}
        else:
            parts["weight"] = numbers.astype(np.int8)
        if not self.symmetric:
            plain = zeros.astype(np.int8) if self.strategy != "tensor" else zeros.astype(np.int8).reshape(1)
            pack = self.packed and self.packed_zeros and self.strategy != "tensor"
            parts["weight_zero_point"] = words(zeros.T + half, self.bits).T.copy() if pack else plain
        if self.reordered:
            parts["weight_g_idx"] = group.astype(np.int32)
        return {name: torch.from_numpy(part) for name, part in parts.items()}, weight

    def args(self) -> dict[str, Any]:
        size = {"group": self.size, "channel": -1, "tensor": None}[self.strategy]
        args = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "group_size": size}
        return args | {"strategy": self.strategy, "dynamic": False, "actorder": "group" if self.reordered else None}

    def config(self, **changes: Any) -> dict[str, Any]:
        form = "pack-quantized" if self.packed else "int-quantized"
        group = {"targets": ["Linear"], "weights": self.args(), "input_activations": None, "output_activations": None}
        fields = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
        return fields | {"ignore": ["lm_head", "re:.*norm"], "quantization_status": "compressed"} | changes


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_are_exact(bits: int, strategy: str, symmetric: bool, checkpoint: Any) -> None:
    quantize = Compressed(bits, strategy, symmetric=symmetric)
    checkpoint(quantize, quantize.config()).check()


@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_plain_integers_are_exact(strategy: str, symmetric: bool, checkpoint: Any) -> None:
    quantize = Compressed(8, strategy, symmetric=symmetric, packed=False)
    checkpoint(quantize, quantize.config()).check()
    checkpoint(quantize, quantize.config(format="naive-quantized")).check()


@pytest.mark.parametrize("symmetric", [True, False])
def test_reordered_columns_and_zero_points_of_old_files(symmetric: bool, checkpoint: Any) -> None:
    quantize = Compressed(reordered=True, symmetric=symmetric, packed_zeros=False)
    written = checkpoint(quantize, quantize.config())
    written.check()


def test_an_order_that_was_never_filled_in_is_none(checkpoint: Any) -> None:
    written = checkpoint(Compressed(), Compressed().config())
    for name in [n for n in written.stored if n.endswith("weight_shape")]:
        width = int(written.stored[name][1])
        written.stored[name.replace("shape", "g_idx")] = torch.full((width,), -1, dtype=torch.int32)
    written.save()
    written.check()


def test_early_files_call_it_compression_config(checkpoint: Any) -> None:
    config = Compressed().config()
    del config["quant_method"]
    written = checkpoint(Compressed())
    written.configure(compression_config=config)
    written.check()


def test_groups_are_found_by_name_pattern_and_class(checkpoint: Any) -> None:
    four, eight, whole = Compressed(), Compressed(8, size=16), Compressed(8, "channel")
    kinds = {"down": eight, "gate": four, "up": four, "k": four, "o": four, "q": four, "v": whole}
    order = iter([*kinds.values()] * 2)
    written = checkpoint(lambda *args: next(order)(*args))
    groups = {
        "a": {"targets": ["Linear"], "weights": four.args()},
        "b": {"targets": ["re:.*mlp\\.down_proj$"], "weights": eight.args()},
        "c": {"targets": [f"model.layers.{i}.self_attn.v_proj" for i in range(2)], "weights": whole.args()},
    }
    written.configure(quantization_config=four.config(config_groups=groups))
    written.check()
    assert "int4 and int8 weights" in written.model().notes[0]
    groups["a"]["targets"] = ["re:.*gate_proj"]
    written.configure(quantization_config=four.config(config_groups=groups))
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.\w+\.\w+_proj' are quantized, but no target"):
        written.model().weights  # noqa: B018


def test_formats_may_differ_between_groups(checkpoint: Any) -> None:
    four, plain = Compressed(), Compressed(8, "channel", packed=False)
    order = iter([plain, four, four, four, four, four, four] * 2)
    written = checkpoint(lambda *args: next(order)(*args))
    groups = {
        "a": {"targets": ["Linear"], "weights": four.args(), "format": "pack-quantized"},
        "b": {"targets": ["re:.*down_proj"], "weights": plain.args(), "format": "int-quantized"},
    }
    written.configure(quantization_config=four.config(config_groups=groups, format="mixed-precision"))
    written.check()


@given(data=st.data(), bits=st.sampled_from([2, 4, 8]), symmetric=st.booleans(), reordered=st.booleans())
def test_any_shape_and_group_size_is_read_exactly(
    data: st.DataObject, bits: int, symmetric: bool, reordered: bool
) -> None:
    out, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 100))
    strategy = data.draw(st.sampled_from(["group", "channel", "tensor"]))
    quantize = Compressed(bits, strategy, data.draw(st.integers(1, 120)), symmetric, reordered=reordered)
    parts, weight = quantize(np.random.default_rng(data.draw(st.integers(0, 99))), out, width)
    stored = {f"a.{name}": part for name, part in parts.items()}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    found = dequantized(source, quantize.config())
    assert found.shapes == {"a.weight": (out, width)}
    np.testing.assert_array_equal(found.load("a.weight").numpy(), weight)


# --- the package's own word -----------------------------------------------------------------------------------------

SCHEMES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("pack-quantized", {"num_bits": bits, "symmetric": symmetric, **strategy})
        for bits in (4, 8)
        for symmetric in (True, False)
        for strategy in ({"strategy": "group", "group_size": 16}, {"strategy": "channel"}, {"strategy": "tensor"})
    ),
    *(("int-quantized", {"num_bits": 8, "strategy": strategy}) for strategy in ("channel", "tensor")),
    *(("float-quantized", {"num_bits": 8, "type": "float", "strategy": s}) for s in ("channel", "tensor")),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 8]}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("form", "args"), SCHEMES, ids=str)
def test_what_the_package_writes_is_read_as_it_reads_it(form: str, args: dict[str, Any], dtype: torch.dtype) -> None:
    package = pytest.importorskip("compressed_tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    calculate = pytest.importorskip("compressed_tensors.quantization.utils").calculate_qparams
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**args))
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, columns = {"tensor": (48, 64), "channel": (1, 64), "group": (1, 16), "block": (16, 8)}[args["strategy"]]
    blocks = weight.view(48 // rows, rows, 64 // columns, columns)
    scale, zero = calculate(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
    if args["strategy"] == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    compressor = package.compressors.BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    theirs = compressor.decompress(parts, scheme)["weight"]
    stored = {f"a.{name}": part for name, part in parts.items()}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    config = {"format": form, "config_groups": {"a": scheme.model_dump(mode="json")}}
    ours = dequantized(source, {"quant_method": "compressed-tensors", **config}).load("a.weight")
    assert theirs.dtype == dtype  # it computes in the scale's precision, we do not round to that
    assert torch.equal(ours.to(dtype), theirs)
    assert (ours - weight.float()).abs().max() < 1


# --- what is refused ------------------------------------------------------------------------------------------------


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": Compressed().args()} | changes}}


def args(**changes: Any) -> dict[str, Any]:
    return group(weights=Compressed().args() | changes)


INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (group(input_activations=INT8), "group_0 quantizes activations .input_activations: int8.*W4A16, W8A16"),
        (group(output_activations=INT8), "group_0 quantizes activations"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.*not supported"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config=.*not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.*sparse-24-bitmask.*dense"),
        ({"sparsity_config": 3}, "sparsity_config=3"),
        *(({"format": form}, f"format='{form}' is not") for form in ("marlin-24", "nvfp4-pack-quantized", "dense")),
        ({"format": None}, "format=None"),
        ({"format": "float-quantized"}, "format='float-quantized' with weights of type 'int'"),
        (args(type="float"), "format='pack-quantized' with weights of type 'float'"),
        *((args(num_bits=bits), "num_bits=") for bits in (0, 3, "4", None, True, [])),
        *((args(group_size=size), "group_size=") for size in (0, -1, -2, "32", 1.5)),
        (args(group_size=64), r"weight_scale' has the shape \[64, 4\].*\[64, 2\]"),
        (args(strategy="tensor_group"), "strategy='tensor_group'.*tensor, channel, group, block"),
        (args(strategy="block"), "block_structure=None"),
        (args(strategy="block", block_structure=[0, 8]), "block_structure="),
        (args(symmetric="yes"), "symmetric='yes'"),
        (args(symmetric=False), "lacks .*weight_zero_point'|weight_zero_point"),
        (args(num_bits=8), "weight_packed' has the shape"),
        (group(weights=None), "config_groups.group_0="),
        (group(targets=[]), "targets="),
        (group(targets="Linear"), "targets="),
        ({"config_groups": {}}, "config_groups={}"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16="),
        ({"config_groups": None}, "config_groups=None"),
    ],
)
def test_a_config_that_is_not_supported_or_does_not_fit_is_named(
    changes: dict[str, Any], message: str, checkpoint: Any
) -> None:
    with pytest.raises(ModelError, match=message):
        checkpoint(Compressed(), Compressed().config(**changes)).model().weights  # noqa: B018


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight_scale", lambda t: t[:-1], "weight_scale' has the shape"),
        ("weight_shape", lambda t: t[:-1], "weight_shape' has the shape"),
        ("weight_shape", lambda t: t + 8, "weight_packed' has the shape"),
        ("weight_shape", lambda t: t * 2**40, "weight_packed' has the shape"),
        ("weight_shape", lambda t: t * 0, "weight_packed' has the shape"),
        ("weight_shape", lambda t: -t, "weight_packed' has the shape"),
        ("weight_shape", lambda t: t.float(), "weight_shape' holds float32"),
        ("weight_packed", lambda t: t[:, :-1], "weight_packed' has the shape"),
        ("weight_packed", lambda t: t.long(), "weight_packed' holds int64"),
        ("weight_zero_point", lambda t: t[:-1], "weight_zero_point' has the shape"),
        ("weight_zero_point", lambda t: t.float(), "weight_zero_point' holds float32"),
        ("weight_g_idx", lambda t: t[:-1], "weight_g_idx' has the shape"),
        ("weight_g_idx", lambda t: t + 5, "weight_g_idx' names the group 6, but there are 2"),
    ],
)
def test_a_part_that_does_not_fit_is_named(part: str, change: Any, message: str, checkpoint: Any) -> None:
    quantize = Compressed(symmetric=False, reordered=True)
    written = checkpoint(quantize, quantize.config())
    written.stored[NAME + part] = change(written.stored[NAME + part])
    written.save()
    with pytest.raises(ModelError, match=f"{NAME}{message}"):
        written.model().weights.load("layers.1.mlp.up.weight")


def test_it_is_told_what_the_weights_are() -> None:
    assert describe(Compressed().config()) == "int4 weights (compressed-tensors)"
