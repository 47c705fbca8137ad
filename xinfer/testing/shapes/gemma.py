"""Tiny models of the family gemma: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu"},
    "bias": COMMON
    | {"head_dim": 12, "attention_bias": True, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 99.0},
}
