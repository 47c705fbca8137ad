"""Tiny models of the family phi: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_key_value_heads": 4, "rope_theta": 500.0},
    "normed": COMMON | {"qk_layernorm": True, "partial_rotary_factor": 1.0, "hidden_act": "relu"},
}
