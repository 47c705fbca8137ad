"""Windows of the text that ships with the package, to see on them what a model computes."""

__all__ = ["windows"]

import numpy as np
from numpy.typing import NDArray

from xinfer.errors import ModelError
from xinfer.models.dummy import byte_tokenizer
from xinfer.models.model import Model
from xinfer.models.quantize.text import sample_text

_FIRST = 4096  # token that windows begin with: who measures takes those before


def windows(model: Model, size: int, count: int | None = None) -> list[NDArray[np.int32]]:
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
