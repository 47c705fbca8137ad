"""Tiny models of the family deepseek_v2: the first is what its checkpoints usually are."""

__all__ = ["NEEDED", "SHAPES"]

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
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 3.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "type": "yarn",
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "plain": COMMON
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "attention_bias": True,
    },
}

NEEDED = {"num_experts_per_tok": 3}
