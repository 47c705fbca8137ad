"""The precision that counts is the coarsest of weights, activations and cache, whoever tells of it."""

import pytest

from xinfer.tasks.noise import coarsest


@pytest.mark.parametrize(
    ("quantization", "dtype", "notes", "expected"),
    [
        (None, "float32", (), "float32"),
        (None, "bfloat16", ("something else",), "bfloat16"),
        ("int4", "bfloat16", (), "int4"),
        (None, "float32", ("the KV cache is int8",), "int8"),
        ("int8", "float32", ("the KV cache is fp8",), "fp8"),
        ("int4", "float32", ("the KV cache is int8",), "int4"),
    ],
)
def test_the_coarsest_counts(quantization: str | None, dtype: str, notes: tuple[str, ...], expected: str):
    assert coarsest(quantization, dtype, notes) == expected
