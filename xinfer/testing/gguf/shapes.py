"""Which tiny models GGUF can say."""

__all__ = ["GGUF_SHAPES", "gguf_shape"]

from xinfer.testing.gguf.common import Config
from xinfer.testing.shapes import shape

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1000.0}

# Of `xinfer.testing.shapes.SHAPES` those that GGUF can say, and what has to be otherwise for that.
GGUF_SHAPES: dict[str, dict[str, Config]] = {
    "llama": {"llama3": {}, "plain": {}, "linear": {}, "yarn": {"rope_scaling": _YARN}},
    "mistral": {"whole": {}},
    "mixtral": {"usual": {}},
    "qwen2": {"usual": {}},
    "qwen3": {"usual": {}, "tied": {}},
    "qwen3_moe": {"usual": {}},
    "gemma2": {"usual": {"query_pre_attn_scalar": 16}},
    "gemma3_text": {"usual": {"query_pre_attn_scalar": 16}},
    "phi3": {"usual": {}, "longrope": {}, "short": {}, "partial": {}},
    "gpt2": {"usual": {}},
    # llama.cpp rounds the dimensions between which yarn mixes, the checkpoint does not: here they are whole numbers.
    "gpt_oss": {
        "usual": {"swiglu_limit": 7.0, "rope_scaling": {**_YARN, "truncate": False, "rope_theta": 212.88}},
        "plain": {},
    },
    "deepseek_v3": {
        "usual": {"rope_scaling": {**_YARN, "type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7}},
        "plain": {"rope_interleave": True},
    },
    "cohere2": {"usual": {}},
    # From here on converters leave out the base of the wavelengths, and the feed-forward part's width may be a rule.
    "gemma": {"usual": {}},
    "phi": {"usual": {"rope_theta": 10_000.0, "intermediate_size": 192}},
    "gpt_neox": {"usual": {"rotary_emb_base": 10_000}, "serial": {"attention_bias": True, "hidden_act": "gelu"}},
    "falcon": {
        "one_key_head": {"rope_theta": 10_000.0},
        "groups": {"ffn_hidden_size": 192},
        "one_norm": {"bias": False},
    },
    "stablelm": {"usual": {"rope_theta": 10_000.0}, "normed": {}},
    "cohere": {"usual": {}, "normed": {"attention_bias": False, "tie_word_embeddings": True}},
    "starcoder2": {"usual": {"sliding_window": None}},
    "olmo": {"usual": {}, "clipped": {"attention_bias": False}},
    "olmo2": {"usual": {}},
    # llama.cpp has one base for all layers
    "olmo3": {
        "usual": {
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        }
    },
    "olmoe": {"usual": {"rms_norm_eps": 1e-5}},
    "granite": {"usual": {}, "bias": {}},
    "granitemoe": {"usual": {}},
    "granitemoeshared": {"usual": {}},
    "smollm3": {"usual": {}},
    "glm4": {"usual": {"attention_bias": True}, "plain": {}},
    "qwen2_moe": {"usual": {}},
    "deepseek_v2": {"usual": {}, "plain": {"attention_bias": False, "q_lora_rank": 20}},
    "glm4_moe": {"usual": {}, "groups": {}},
    "glm4_moe_lite": {"usual": {}},
    "dots1": {"usual": {"num_key_value_heads": 4}},
    "arcee": {"usual": {"rope_scaling": _YARN}},
    "seed_oss": {"usual": {}},
    "nemotron": {"usual": {}},
    "exaone4": {"usual": {}, "whole": {"head_dim": 12}},
    "ernie4_5": {"usual": {}},
    "gpt_bigcode": {"usual": {}},
    "hunyuan_v1_dense": {"usual": {}, "bias": {"attention_bias": False}},
    "hunyuan_v1_moe": {"usual": {}},
    "ministral3": {
        "usual": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.5}}
    },
}


def gguf_shape(family: str, name: str) -> Config:
    """Return a config.json's content, of one of the `GGUF_SHAPES` of a family."""
    return shape(family, name) | GGUF_SHAPES[family][name]
