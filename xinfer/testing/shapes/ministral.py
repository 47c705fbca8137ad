"""Tiny models of the family ministral: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_theta": 500.0,
    },
    "everywhere": COMMON | {"head_dim": 12, "sliding_window": 20, "tie_word_embeddings": True},
}
