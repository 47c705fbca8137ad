"""AWQ weights, packed by the order that AutoAWQ's `pack` is written down with."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.errors import ModelError
from xinfer.models.quantized import dequantized
from xinfer.models.weights import Tensors

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that each nibble of a word holds


def words(codes: np.ndarray) -> np.ndarray:
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(packed.shape[1]):
        for nibble, output in enumerate(ORDER):
            packed[:, word] |= codes[:, word * 8 + output].astype(np.uint32) << np.uint32(4 * nibble)
    return packed.view(np.int32)


class Awq:
    def __init__(self, size: int = 32):
        self.size = size

    def __call__(self, rng: np.random.Generator, out: int, width: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        size = width if self.size == -1 else self.size
        groups = -(-width // size)
        codes, zeros = rng.integers(0, 16, (width, out)), rng.integers(0, 16, (groups, out))
        scales = rng.uniform(0.01, 0.03, (groups, out)).astype(np.float16)
        of_row = np.arange(width) // size
        weight = (codes - zeros[of_row]).astype(np.float32) * scales[of_row].astype(np.float32)
        parts = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
        return {name: torch.from_numpy(part) for name, part in parts.items()}, weight.T


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | changes


@pytest.mark.parametrize("size", [-1, 16, 32])
@pytest.mark.parametrize("version", ["gemm", "GEMM", None])
def test_weights_are_exact(size: int, version: str | None, checkpoint: Any) -> None:
    checkpoint(Awq(size), config(group_size=size, version=version, modules_to_not_convert=["lm_head"])).check()


@given(data=st.data())
def test_any_shape_and_group_size_is_read_exactly(data: st.DataObject) -> None:
    width, out = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 9)) * 8
    size = data.draw(st.just(-1) | st.integers(1, 100))
    parts, weight = Awq(size)(np.random.default_rng(data.draw(st.integers(0, 99))), out, width)
    stored = {f"a.{name}": part for name, part in parts.items()}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    found = dequantized(source, config(group_size=size))
    assert found.shapes == {"a.weight": (out, width)}
    np.testing.assert_array_equal(found.load("a.weight").numpy(), weight)


def test_autoawqs_own_words_are_understood(checkpoint: Any) -> None:
    checkpoint(Awq(), {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "version='gemv' is not supported .supported: gemm"),
        ({"version": None, "format": "marlin"}, "format='marlin'"),
        ({"zero_point": False}, "zero_point=false"),
        ({"zero_point": 1}, "zero_point=1"),
        *(({"bits": bits}, "bits=.*4 is expected") for bits in (3, 8, "4", None, 0)),
        *(({"group_size": size}, "group_size=") for size in (0, -2, "32", None)),
        ({"group_size": 64}, r"qzeros' has the shape \[4, 8\].*\[2, 8\]"),
    ],
)
def test_a_config_that_does_not_fit_is_named(changes: dict[str, Any], message: str, checkpoint: Any) -> None:
    with pytest.raises(ModelError, match=message):
        checkpoint(Awq(), config(**changes)).model().weights  # noqa: B018


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda t: t[:-1], "scales' has the shape"),
        ("scales", lambda t: t[:, :-8], "scales' has the shape"),
        ("qzeros", lambda t: t[:, :-1], "qzeros' has the shape"),
        ("qweight", lambda t: t[:, :0], "qweight' has the shape"),
        ("qweight", lambda t: t.long(), "qweight' holds int64"),
        ("scales", lambda t: t.double(), "scales' holds float64"),
    ],
)
def test_a_part_that_does_not_fit_is_named(part: str, change: Any, message: str, checkpoint: Any) -> None:
    written = checkpoint(Awq(), config())
    written.stored[NAME + part] = change(written.stored[NAME + part])
    written.save()
    with pytest.raises(ModelError, match=f"{NAME}{message}"):
        written.model().weights.load("layers.1.mlp.up.weight")
