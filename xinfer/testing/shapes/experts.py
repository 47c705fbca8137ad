"""Shapes of decoders with experts."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes.common import EXPERTS, LATENT, ROUTED, YARN, Shapes

SHAPES: Shapes = {
    "mixtral": {
        "usual": {"num_local_experts": 6, "num_experts_per_tok": 2},
        "window": {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7},
    },
    "qwen3_moe": {
        "usual": {"head_dim": 16, **EXPERTS, "norm_topk_prob": True},
        "mixed": {"head_dim": 12, **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    },
    "gpt_oss": {
        "usual": {
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_scaling": {**YARN, "truncate": False},
            "swiglu_limit": 1.5,
        },
        "plain": {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
        },
    },
    "deepseek_v3": {
        "usual": {
            **LATENT,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7},
        },
        "plain": {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    },
    "qwen2_moe": {
        "usual": {**EXPERTS, "shared_expert_intermediate_size": 56, "num_key_value_heads": 4},
        "mixed": {
            **EXPERTS,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    },
    "olmoe": {
        "usual": {**EXPERTS, "num_key_value_heads": 4},
        "clipped": {**EXPERTS, "clip_qkv": 0.8, "norm_topk_prob": True, "attention_bias": True},
    },
    "granitemoe": {
        "usual": {
            **EXPERTS,
            "num_local_experts": 6,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
        "bias": {"num_local_experts": 4, "attention_bias": True, "attention_multiplier": 0.2},
    },
    "granitemoeshared": {
        "usual": {"num_local_experts": 4, "shared_intermediate_size": 30, "attention_multiplier": 0.4},
        "unshared": {"num_local_experts": 4, "tie_word_embeddings": True, "attention_multiplier": 0.2},
    },
    "deepseek_v2": {
        "usual": {
            **LATENT,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "rope_scaling": {**YARN, "type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        "plain": {**LATENT, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2},
    },
    "glm4_moe": {
        "usual": {
            **ROUTED,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
        "groups": {**ROUTED, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "partial_rotary_factor": 1.0},
    },
    "glm4_moe_lite": {
        "usual": {**LATENT, "q_lora_rank": 20, "rope_theta": 1e6},
        "types": {
            **LATENT,
            "q_lora_rank": None,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "rope_interleave": False,
        },
    },
    "dots1": {
        "usual": {**ROUTED, "head_dim": 16, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "window": {
            **ROUTED,
            "head_dim": 12,
            "sliding_window": 9,
            "max_window_layers": 1,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "first_k_dense_replace": 0,
        },
    },
    "hunyuan_v1_moe": {
        "usual": {"head_dim": 16, "num_experts": 6, "moe_topk": 2},
        "lists": {"head_dim": 12, "num_experts": 6, "moe_topk": [1, 3, 2], "attention_bias": True},
    },
}
