"""Tiny models of the family arcee: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "beta_fast": 16,
        }
    },
    "bias": COMMON | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True},
}
