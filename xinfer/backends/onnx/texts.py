"""The text that ships with the package, as calls: windows of it, each computed from its beginning."""

__all__ = ["Call", "call", "windows"]

import numpy as np
from numpy.typing import NDArray

from xinfer.backends.onnx.attention import head_width
from xinfer.errors import ModelError
from xinfer.models.dummy import byte_tokenizer
from xinfer.models.model import Model
from xinfer.models.quantize.text import sample_text
from xinfer.models.spec import DecoderSpec

Tokens = NDArray[np.int32]
Call = dict[str, NDArray[np.generic]]  # inputs by name
_FIRST = 4096  # token that windows begin with: who measures takes those before


def windows(model: Model, size: int, count: int | None = None) -> list[Tokens]:
    """Return windows of so many tokens of the text that ships with the package.

    Args:
        model: whose tokens they are.
        size: tokens of each.
        count: how many, evenly spread; None for as many as there are side by side.
    """
    try:
        ids = model.tokenizer.encode(sample_text())
    except ModelError:  # there is none; whoever runs such a model sends ids
        ids = byte_tokenizer().encode(sample_text())
    tokens = np.array(ids, np.int32) % model.spec.vocab_size
    first, last = min(_FIRST, len(tokens) // 2), len(tokens) - size
    starts = range(first, last + 1, size) if count is None else np.linspace(first, last, count).astype(int)
    return [tokens[start : start + size] for start in starts]


def call(spec: DecoderSpec, tokens: Tokens) -> Call:
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
