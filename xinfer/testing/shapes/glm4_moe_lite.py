"""Tiny models of the family glm4_moe_lite: the first is what its checkpoints usually are."""

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
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "rope_theta": 1000000.0,
    },
    "types": COMMON
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_group": 4,
        "topk_group": 2,
        "rope_interleave": False,
    },
}
