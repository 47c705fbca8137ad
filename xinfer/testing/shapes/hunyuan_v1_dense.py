"""Tiny models of the family hunyuan_v1_dense: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "bias": COMMON | {"head_dim": 12, "attention_bias": True, "rope_theta": 500.0, "tie_word_embeddings": True},
}
