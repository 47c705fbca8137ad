"""Tiny models of the family gemma3_text: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "head_dim": 16,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 20,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
    },
    "parameters": COMMON
    | {
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}
