"""Tiny models of the family glm4_moe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
    "groups": COMMON
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "partial_rotary_factor": 1.0,
    },
}
