"""Tiny models of the family cohere: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"logit_scale": 0.8, "tie_word_embeddings": True, "rope_theta": 500.0},
    "normed": COMMON | {"use_qk_norm": True, "attention_bias": True, "logit_scale": 2.0},
}
