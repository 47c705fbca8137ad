"""Tiny models of the family hunyuan_v1_moe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "num_experts": 6, "moe_topk": 2},
    "lists": COMMON | {"head_dim": 12, "num_experts": 6, "moe_topk": [1, 3, 2], "attention_bias": True},
}
