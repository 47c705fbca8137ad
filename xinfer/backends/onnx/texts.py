"""Windows of a text as calls, each computed from its beginning."""

__all__ = ["Call", "call"]

import numpy as np
from numpy.typing import NDArray

from xinfer.backends.onnx.attention import head_width
from xinfer.models.spec import DecoderSpec

Call = dict[str, NDArray[np.generic]]  # inputs by name


def call(spec: DecoderSpec, tokens: NDArray[np.int32]) -> Call:
    """Return what a graph of `decoder.write` is fed to compute a sequence from its beginning; it may not need all."""
    size = len(tokens)
    empty: Call = {
        f"past_key_values.{index}.{part}": np.empty(
            (1, layer.attention.kv_heads, 0, head_width(layer.attention)), np.float32
        )
        for index, layer in enumerate(spec.layers)
        for part in ("key", "value")
    }
    return empty | {
        "input_ids": tokens[None],
        "last": np.array([size - 1], np.int32),
        "longest": np.array([size], np.int32),
        "lengths": np.array([size], np.int32),
        "sample_at": np.empty(0, np.int32),
        "position_ids": np.arange(size)[None],
    }
