"""Tiny models of the family glm4: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "rope_theta": 500.0},
    "plain": COMMON
    | {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
}
