"""Tiny models of the family glm: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "attention_bias": True, "rope_theta": 500.0},
    "plain": COMMON | {"head_dim": 16, "attention_bias": False, "rope_parameters": {"partial_rotary_factor": 0.25}},
}
