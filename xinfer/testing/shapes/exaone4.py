"""Tiny models of the family exaone4: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 4, "rope_theta": 500.0},
    "whole": COMMON
    | {
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
        "head_dim": 20,
        "tie_word_embeddings": True,
    },
    "types": COMMON | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}
