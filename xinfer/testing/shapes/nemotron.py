"""Tiny models of the family nemotron: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
    "bias": COMMON | {"partial_rotary_factor": 1.0, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
}
