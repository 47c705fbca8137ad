"""Tiny models of the family stablelm: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "rope_theta": 500.0},
    "normed": COMMON | {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 1.0},
}
