"""Tiny models of the family ministral3: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "window": COMMON
    | {
        "head_dim": 12,
        "sliding_window": 20,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "original_max_position_embeddings": 30,
            "llama_4_scaling_beta": 0.5,
        },
    },
}
