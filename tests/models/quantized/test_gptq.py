"""GPTQ weights, written by a packer that knows nothing of ours: a stream of bits for each row."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.errors import ModelError
from xinfer.models.quantized import dequantized
from xinfer.models.weights import Tensors


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row of codes as a stream of bits, the lowest first, in words of 32."""
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


class Gptq:
    """A quantizer that draws everything at random, and so is sure of every bit."""

    def __init__(self, bits: int = 4, size: int = 32, offset: int = 1, act_order: bool = False, g_idx: bool = True):
        self.bits, self.size, self.offset, self.act_order, self.g_idx = bits, size, offset, act_order, g_idx

    def __call__(self, rng: np.random.Generator, out: int, width: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        bits, most = self.bits, 2**self.bits
        size = width if self.size == -1 else min(self.size, width)
        groups = -(-width // size)
        codes, zeros = rng.integers(0, most, (out, width)), rng.integers(0, most, (groups, out))
        scales = rng.uniform(0.5, 1.5, (groups, out)).astype(np.float16) / np.float16(most * 4)
        of_column = rng.permutation(np.arange(width) // size) if self.act_order else np.arange(width) // size
        weight = np.empty((out, width), np.float32)
        for column, group in enumerate(of_column):
            weight[:, column] = (codes[:, column] - zeros[group]).astype(np.float32) * scales[group].astype(np.float32)
        parts = {
            "qweight": words(codes, bits).T.copy(),
            "qzeros": words((zeros - self.offset) % most, bits),
            "scales": scales,
            "g_idx": of_column.astype(np.int32),
        }
        if not self.g_idx:
            del parts["g_idx"]
        return {name: torch.from_numpy(part) for name, part in parts.items()}, weight


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | changes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [-1, 16, 32])
@pytest.mark.parametrize("act_order", [False, True])
def test_weights_are_exact(bits: int, size: int, act_order: bool, checkpoint: Any) -> None:
    quantize = Gptq(bits, size, act_order=act_order)
    checkpoint(quantize, config(bits=bits, group_size=size, desc_act=act_order)).check()


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_the_second_version_stores_zero_points_as_they_are(key: str, checkpoint: Any) -> None:
    checkpoint(Gptq(offset=0), config(**{key: "gptq_v2"})).check()


def test_old_files_have_no_order_of_columns_or_one_that_was_never_filled_in(checkpoint: Any) -> None:
    written = checkpoint(Gptq(g_idx=False), config())
    written.check()
    for name in [n for n in written.stored if n.endswith(".qweight")]:
        in_features = written.stored[name].shape[0] * 8
        written.stored[name.replace("qweight", "g_idx")] = torch.zeros(in_features, dtype=torch.int32)
    written.save()
    written.check()


def test_settings_may_differ_between_modules(checkpoint: Any) -> None:
    count = iter(range(100))
    kinds = [Gptq(8, 16) if i % 7 in (0, 2) else Gptq() for i in range(14)]
    written = checkpoint(lambda *args: kinds[next(count)](*args), config())
    names = [name.removesuffix(".weight") for name in written.weights if name.endswith("_proj.weight")]
    other = {"bits": 8, "group_size": 16}
    eight = {f"+:{re.escape(name)}$": other for name, kind in zip(names, kinds, strict=True) if kind.bits == 8}
    written.configure(quantization_config=config(dynamic={"-:.*norm": {}, **eight, ".*": {}}))
    written.check()


@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 8]), act_order=st.booleans(), offset=st.sampled_from([0, 1]))
def test_any_shape_and_group_size_is_read_exactly(data: st.DataObject, bits: int, act_order: bool, offset: int) -> None:
    width = data.draw(st.integers(1, 12)) * (32 if bits == 3 else 32 // bits)
    out = data.draw(st.integers(1, 40))
    size = data.draw(st.sampled_from([-1, 2**70]) | st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    parts, weight = Gptq(bits, size, offset, act_order)(rng, out, width)
    stored = {f"a.{name}": part for name, part in parts.items()}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    form = {"checkpoint_format": "gptq_v2"} if offset == 0 else {}
    found = dequantized(source, config(bits=bits, group_size=size, **form))
    assert found.shapes == {"a.weight": (out, width)}
    np.testing.assert_array_equal(found.load("a.weight").numpy(), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"bits": bits}, "bits=.*2, 3, 4, 8") for bits in (0, 5, "4", 4.0, True, None, [4], -4, 2**70)),
        *(({"group_size": size}, "group_size=") for size in (0, -2, "32", 32.0, None, True, [])),
        ({"group_size": 64}, r"scales' has the shape \[4, 64\].*\[2, 64\]"),
        ({"bits": 8}, r"has the shape"),
        ({"desc_act": "no"}, "desc_act='no'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'.*gptq, gptq_v2"),
        ({"is_marlin_format": True}, "is_marlin_format=true"),
        ({"pack_dtype": "int8"}, "pack_dtype='int8'"),
        ({"dynamic": [1]}, "dynamic"),
        ({"dynamic": {"(a+)+": {}}}, "repeats too much"),
        ({"dynamic": {"(a": {}}}, "no regular expression"),
        ({"dynamic": {".*": 5}}, "=5"),
    ],
)
def test_a_config_that_does_not_fit_is_named(changes: dict[str, Any], message: str, checkpoint: Any) -> None:
    with pytest.raises(ModelError, match=message):
        checkpoint(Gptq(), config(**changes)).model().weights  # noqa: B018


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize("part", ["scales", "qzeros"])
def test_a_missing_part_is_named(part: str, checkpoint: Any) -> None:
    written = checkpoint(Gptq(), config())
    del written.stored[NAME + part]
    written.save()
    with pytest.raises(ModelError, match=f"lacks '{NAME}{part}'"):
        written.model().weights  # noqa: B018


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda t: t[:-1], "scales' has the shape"),
        ("scales", lambda t: t[:, :-1], "scales' has the shape"),
        ("scales", lambda t: t[0], "scales' has the shape"),
        ("qzeros", lambda t: t[:, :-1], "qzeros' has the shape"),
        ("g_idx", lambda t: t[:-1], "g_idx' has the shape"),
        ("qweight", lambda t: t[:0], "qweight' has the shape"),
        ("qweight", lambda t: t[None], "qweight' has the shape"),
        ("scales", lambda t: t.int(), "scales' holds int32"),
        ("qweight", lambda t: t.float(), "qweight' holds float32"),
        ("qzeros", lambda t: t.to(torch.int16), "qzeros' holds int16"),
        ("g_idx", lambda t: t.float(), "g_idx' holds float32"),
        ("g_idx", lambda t: t + 1, "names the group 2, but there are 2"),
        ("g_idx", lambda t: t - 1, "names the group -1"),
        ("g_idx", lambda t: t + 2**30, "names the group 107374182"),
    ],
)
def test_a_part_that_does_not_fit_is_named(part: str, change: Any, message: str, checkpoint: Any) -> None:
    written = checkpoint(Gptq(), config())
    written.stored[NAME + part] = change(written.stored[NAME + part])
    written.save()
    with pytest.raises(ModelError, match=f"{NAME}{message}" if " the group" not in message else message):
        written.model().weights.load("layers.1.mlp.up.weight")


def test_biases_of_zeros_that_old_tools_added_are_left_out(checkpoint: Any) -> None:
    written = checkpoint(Gptq(), config())
    for name in [n for n in written.stored if n.endswith(".qweight")]:
        written.stored[name.replace("qweight", "bias")] = torch.zeros(written.stored[name].shape[1])
    written.save()
    written.check()
    written.stored[NAME + "bias"][3] = 1
    written.save()
    with pytest.raises(ModelError, match=f"unknown '{NAME}bias'"):
        written.model().weights  # noqa: B018


def test_nothing_is_read_before_it_is_asked_for() -> None:
    parts, weight = Gptq()(np.random.default_rng(0), 64, 64)
    stored = {f"{m}.{name}": part for m in "ab" for name, part in parts.items()} | {"norm.weight": torch.ones(3)}
    read: list[str] = []
    source = Tensors(
        {name: tuple(t.shape) for name, t in stored.items()}, lambda name: read.append(name) or stored[name], ()
    )
    found = dequantized(source, config())
    assert not read
    np.testing.assert_array_equal(found.load("b.weight").numpy(), weight)
    assert sorted(read) == ["b.g_idx", "b.qweight", "b.qzeros", "b.scales"]
