"""Tiny models of the family gpt_oss: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "truncate": False,
        },
        "swiglu_limit": 1.5,
    },
    "plain": COMMON
    | {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
}
