"""Tiny models of the family llama: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "llama3": COMMON
    | {
        "rope_parameters": {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "plain": COMMON | {"rope_theta": 500.0, "attention_bias": True, "num_key_value_heads": 1},
    "linear": COMMON | {"rope_scaling": {"type": "linear", "factor": 4.0}, "head_dim": 20, "tie_word_embeddings": True},
    "yarn": COMMON
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "attention_factor": 0.8,
            "beta_fast": 16,
            "beta_slow": 2,
        }
    },
    "dynamic": COMMON | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
}
