"""Tiny models of the family starcoder2: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"sliding_window": 9, "tie_word_embeddings": True},
    "plain": COMMON | {"sliding_window": None, "use_bias": False, "rope_theta": 500.0, "norm_epsilon": 0.001},
}
