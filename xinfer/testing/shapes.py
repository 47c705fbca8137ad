"""Tiny models of every family, as their config.json says it: between them they use every field of `DecoderSpec`."""

__all__ = ["LONG", "SHAPES", "shape"]

from typing import Any

Config = dict[str, Any]

_COMMON: Config = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: Config = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 40}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1000.0}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}
_GPT2: Config = {
    "vocab_size": 160,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: Config = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

# What is not common, by family and shape; the first shape is what its checkpoints usually are.
_OWN: dict[str, dict[str, Config]] = {
    "llama": {
        "llama3": {"rope_parameters": {"rope_theta": 5e5, **_LLAMA3}},
        "plain": {"rope_theta": 500.0, "attention_bias": True, "num_key_value_heads": 1},
        "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "head_dim": 20, "tie_word_embeddings": True},
        "yarn": {"rope_scaling": {**_YARN, "attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2}},
        "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    },
    "mistral": {"window": {"sliding_window": 16}, "whole": {"sliding_window": None, "head_dim": 16}},
    "mixtral": {
        "usual": {"num_local_experts": 6, "num_experts_per_tok": 2},
        "window": {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7},
    },
    "qwen2": {
        "usual": {"use_sliding_window": False},
        "window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3": {"usual": {"head_dim": 16}, "tied": {"head_dim": 20, "tie_word_embeddings": True}},
    "qwen3_moe": {
        "usual": {"head_dim": 16, **_EXPERTS, "norm_topk_prob": True},
        "mixed": {"head_dim": 12, **_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    },
    "gemma2": {
        "usual": {"head_dim": 16, "sliding_window": 9, "tie_word_embeddings": True, "query_pre_attn_scalar": 20},
        "uncapped": {
            "head_dim": 16,
            "sliding_window": 30,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 5.0,
        },
    },
    "gemma3_text": {
        "usual": {
            "head_dim": 16,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 20,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
        },
        "parameters": {
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    },
    "phi3": {
        "usual": {"rope_theta": 300.0, "num_key_value_heads": 4},
        "longrope": {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 32},
        "short": {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 96, "sliding_window": 20},
        "partial": {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    },
    "gpt2": {"usual": {}, "wide": {"n_inner": 60, "scale_attn_weights": False, "activation_function": "relu"}},
    "gpt_oss": {
        "usual": {
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_scaling": {**_YARN, "truncate": False},
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
            **_LATENT,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {**_YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7},
        },
        "plain": {
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    },
    "cohere2": {
        "usual": {"sliding_window": 9, "sliding_window_pattern": 3, "tie_word_embeddings": True, "logit_scale": 0.8},
        "bias": {
            "sliding_window": 30,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
            "logit_scale": 2.0,
        },
    },
}

SHAPES: dict[str, tuple[str, ...]] = {family: tuple(own) for family, own in _OWN.items()}

# Longer contexts turn all of their positions otherwise. To the reference a context is long when the sequence is, here
# when the run's may be (`engine.max_model_len`): these are compared where both are.
LONG = {("llama", "dynamic"), ("phi3", "longrope")}


def shape(family: str, name: str) -> Config:
    """Return a config.json's content, of one of the `SHAPES` of a family."""
    common = _GPT2 if family == "gpt2" else _COMMON
    return {"model_type": family, **common, **_OWN[family][name]}
