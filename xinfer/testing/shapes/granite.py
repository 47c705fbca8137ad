"""Tiny models of the family granite: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.5,
        "tie_word_embeddings": True,
    },
    "bias": COMMON | {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2},
}
