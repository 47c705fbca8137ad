"""Tiny models of the family olmo3: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "attention_factor": 1.2,
        },
    },
    "parameters": COMMON
    | {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 12,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}
