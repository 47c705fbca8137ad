"""Tiny models of the family granitemoeshared: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_local_experts": 4, "shared_intermediate_size": 30, "attention_multiplier": 0.4},
    "unshared": COMMON | {"num_local_experts": 4, "tie_word_embeddings": True, "attention_multiplier": 0.2},
}
