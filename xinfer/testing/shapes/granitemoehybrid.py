"""Tiny models of the family granitemoehybrid: the first is what its checkpoints usually are."""

__all__ = ["NEEDED", "SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "layer_types": ["attention", "attention", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 60,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "mamba_n_heads": 4,
    },
    "unturned": COMMON
    | {
        "layer_types": ["full_attention", "full_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 70,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.2,
        "mamba_n_heads": 4,
    },
}

NEEDED = {"layer_types": ["attention"] * 8, "num_local_experts": 0}
