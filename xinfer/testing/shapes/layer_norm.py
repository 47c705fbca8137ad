"""Shapes of decoders whose norms take the mean off: most have parallel parts or no gate."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes.common import Shapes

SHAPES: Shapes = {
    "gpt2": {"usual": {}, "wide": {"n_inner": 60, "scale_attn_weights": False, "activation_function": "relu"}},
    "cohere2": {
        "usual": {"sliding_window": 9, "sliding_window_pattern": 3, "tie_word_embeddings": True, "logit_scale": 0.8},
        "bias": {
            "sliding_window": 30,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
            "logit_scale": 2.0,
        },
    },
    "phi": {
        "usual": {"num_key_value_heads": 4, "rope_theta": 500.0},
        "normed": {"qk_layernorm": True, "partial_rotary_factor": 1.0, "hidden_act": "relu"},
    },
    "gpt_neox": {
        "usual": {"rotary_pct": 0.5, "rotary_emb_base": 500},
        "serial": {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rotary_pct": 1.0,
            "hidden_act": "gelu_new",
        },
        "parameters": {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    },
    "gptj": {"usual": {"rotary_dim": 8}, "tied": {"rotary_dim": 12, "n_inner": 60, "tie_word_embeddings": True}},
    "falcon": {
        "one_key_head": {"multi_query": True, "tie_word_embeddings": True, "rope_theta": 500.0},
        "groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 60},
        "one_norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
        "serial": {"multi_query": False, "parallel_attn": False, "bias": True, "activation": "relu"},
    },
    "stablelm": {
        "usual": {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "rope_theta": 500.0},
        "normed": {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 1.0},
    },
    "starcoder2": {
        "usual": {"sliding_window": 9, "tie_word_embeddings": True},
        "plain": {"sliding_window": None, "use_bias": False, "rope_theta": 500.0, "norm_epsilon": 1e-3},
    },
    "olmo": {
        "usual": {"num_key_value_heads": 4},
        "clipped": {"clip_qkv": 0.8, "attention_bias": True, "tie_word_embeddings": True},
    },
    "cohere": {
        "usual": {"logit_scale": 0.8, "tie_word_embeddings": True, "rope_theta": 500.0},
        "normed": {"use_qk_norm": True, "attention_bias": True, "logit_scale": 2.0},
    },
    "gpt_bigcode": {
        "usual": {"multi_query": True},
        "heads": {"multi_query": False, "n_inner": 60, "scale_attn_weights": False, "activation_function": "relu"},
    },
    "nemotron": {
        "usual": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
        "bias": {"partial_rotary_factor": 1.0, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    },
}
