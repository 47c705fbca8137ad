"""Tiny models of the family gpt_neox: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"rotary_pct": 0.5, "rotary_emb_base": 500},
    "serial": COMMON
    | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
    "parameters": COMMON
    | {
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
    },
}
