"""Tiny models of the family cohere2: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {"sliding_window": 9, "sliding_window_pattern": 3, "tie_word_embeddings": True, "logit_scale": 0.8},
    "bias": COMMON
    | {
        "sliding_window": 30,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "logit_scale": 2.0,
    },
}
