"""Tiny models of the family helium: the first is what its checkpoints usually are."""

__all__ = ["NEEDED", "SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 12, "num_key_value_heads": 4, "rope_theta": 500.0},
    "bias": COMMON | {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}

NEEDED = {"num_attention_heads": 40}  # of which its 20 key heads are a divisor
