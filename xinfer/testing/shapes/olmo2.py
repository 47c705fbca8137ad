"""Tiny models of the family olmo2: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "bias": COMMON | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.001},
}
