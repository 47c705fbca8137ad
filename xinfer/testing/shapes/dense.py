"""Shapes of decoders built like llama: gates, norms by root mean square."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes.common import GROWING, LLAMA3, LONGROPE, YARN, Shapes

SHAPES: Shapes = {
    "llama": {
        "llama3": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        "plain": {"rope_theta": 500.0, "attention_bias": True, "num_key_value_heads": 1},
        "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "head_dim": 20, "tie_word_embeddings": True},
        "yarn": {"rope_scaling": {**YARN, "attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2}},
        "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    },
    "mistral": {"window": {"sliding_window": 16}, "whole": {"sliding_window": None, "head_dim": 16}},
    "qwen2": {
        "usual": {"use_sliding_window": False},
        "window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3": {"usual": {"head_dim": 16}, "tied": {"head_dim": 20, "tie_word_embeddings": True}},
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
        "longrope": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
        "short": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 96, "sliding_window": 20},
        "partial": {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    },
    "gemma": {
        "usual": {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu"},
        "bias": {"head_dim": 12, "attention_bias": True, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 99.0},
    },
    "olmo2": {
        "usual": {"num_key_value_heads": 4, "rope_theta": 5e5},
        "bias": {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    },
    "granite": {
        "usual": {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
        "bias": {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2},
    },
    "smollm3": {
        "usual": {"num_hidden_layers": 4, "rope_theta": 5e4, "tie_word_embeddings": True},
        "window": {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {**YARN, "type": "yarn"},
        },
    },
    "glm4": {
        "usual": {"head_dim": 16, "rope_theta": 500.0},
        "plain": {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    },
    "glm": {
        "usual": {"head_dim": 16, "attention_bias": True, "rope_theta": 500.0},
        "plain": {"head_dim": 16, "attention_bias": False, "rope_parameters": {"partial_rotary_factor": 0.25}},
    },
    "granitemoehybrid": {
        "usual": {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 60,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "mamba_n_heads": 4,
        },
        "unturned": {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 70,
            "position_embedding_type": "nope",
            "attention_multiplier": 0.2,
            "mamba_n_heads": 4,
        },
    },
    "ministral": {
        "usual": {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
            "rope_theta": 500.0,
        },
        "everywhere": {"head_dim": 12, "sliding_window": 20, "tie_word_embeddings": True},
    },
    "olmo3": {
        "usual": {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_theta": 5e5,
            "rope_scaling": {**YARN, "attention_factor": 1.2},
        },
        "parameters": {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 12,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    },
    "exaone4": {
        "usual": {"num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 4, "rope_theta": 500.0},
        "whole": {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "head_dim": 20,
            "tie_word_embeddings": True,
        },
        "types": {"sliding_window": 12, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
    },
    "ernie4_5": {
        "usual": {"head_dim": 16, "rope_theta": 500.0, "tie_word_embeddings": True},
        "bias": {"head_dim": 12, "use_bias": True, "rope_theta": 5e5},
    },
    "arcee": {
        "usual": {"rope_scaling": {**YARN, "beta_fast": 16}},
        "bias": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True},
    },
    "seed_oss": {
        "usual": {"head_dim": 20, "attention_bias": True},
        "bias": {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    },
    "hunyuan_v1_dense": {
        "usual": {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        "bias": {"head_dim": 12, "attention_bias": True, "rope_theta": 500.0, "tie_word_embeddings": True},
    },
    "ministral3": {
        "usual": {"head_dim": 16, "rope_parameters": {**YARN, **GROWING}},
        "window": {
            "head_dim": 12,
            "sliding_window": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 30, **GROWING},
        },
    },
}
