"""Tiny models of the family qwen3: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16},
    "tied": COMMON | {"head_dim": 20, "tie_word_embeddings": True},
}
