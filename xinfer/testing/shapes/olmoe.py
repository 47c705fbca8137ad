"""Tiny models of the family olmoe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 40, "num_key_value_heads": 4},
    "clipped": COMMON
    | {
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "clip_qkv": 0.8,
        "norm_topk_prob": True,
        "attention_bias": True,
    },
}
