"""Tiny models of the family phi3: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"rope_theta": 300.0, "num_key_value_heads": 4},
    "longrope": COMMON
    | {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
        },
        "original_max_position_embeddings": 32,
    },
    "short": COMMON
    | {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
        },
        "original_max_position_embeddings": 96,
        "sliding_window": 20,
    },
    "partial": COMMON | {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
}
