"""Tiny models of the family qwen2_moe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_key_value_heads": 4,
    },
    "mixed": COMMON
    | {
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
}
