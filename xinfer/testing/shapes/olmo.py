"""Tiny models of the family olmo: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_key_value_heads": 4},
    "clipped": COMMON | {"clip_qkv": 0.8, "attention_bias": True, "tie_word_embeddings": True},
}
