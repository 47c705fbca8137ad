"""Tiny models of the family seed_oss: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 20, "attention_bias": True},
    "bias": COMMON | {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
}
