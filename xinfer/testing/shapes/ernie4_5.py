"""Tiny models of the family ernie4_5: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "rope_theta": 500.0, "tie_word_embeddings": True},
    "bias": COMMON | {"head_dim": 12, "use_bias": True, "rope_theta": 500000.0},
}
