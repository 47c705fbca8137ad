"""The keys that llama.cpp's converter writes for a config.json."""

__all__ = ["falcon", "keys_of"]

import math
from collections.abc import Callable

from gguf import MODEL_ARCH as ARCH

from xinfer.testing.gguf.common import Config, first, head_dim, turning

_WORDS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
_WITHOUT_ROPE = (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GPT2, ARCH.GPTNEOX, ARCH.PHI2, ARCH.FALCON, ARCH.STABLELM)
_WITH_VOCABULARY = (ARCH.LLAMA, ARCH.GRANITE, ARCH.GRANITE_MOE, ARCH.SMOLLM3, ARCH.DEEPSEEK2, ARCH.COHERE2)


def keys_of(config: Config, architecture: ARCH) -> Config:
    """Return the keys of an architecture, without its name."""
    values = {name: first(config, *words) for name, words in _WORDS.items()}
    keys = {name: value for name, value in values.items() if value is not None}
    keys["vocab_size"] = config["vocab_size"]  # not all converters write it, but here is no list of tokens
    if architecture not in (*_WITHOUT_ROPE, ARCH.PHI3):
        keys |= _rope(config)
    own = {
        ARCH.LLAMA: _whole_heads_turn,
        ARCH.GRANITE: _granite,
        ARCH.GRANITE_MOE: lambda c: _granite(c) | _shared_size(c, "shared_intermediate_size"),
        ARCH.SMOLLM3: _whole_heads_turn,
        ARCH.QWEN3MOE: _qwen_moe,
        ARCH.QWEN2MOE: _qwen_moe,
        ARCH.GEMMA2: _gemma2,
        ARCH.GEMMA3: _gemma3,
        ARCH.PHI2: _phi2,
        ARCH.PHI3: _phi3,
        ARCH.GPT2: lambda c: {"feed_forward_length": c["n_inner"] or 4 * c["n_embd"]},
        ARCH.GPTNEOX: _gpt_neox,
        ARCH.GPT_OSS: _gpt_oss,
        ARCH.DEEPSEEK2: _deepseek,
        ARCH.COMMAND_R: lambda c: {"logit_scale": float(c["logit_scale"]), "rope.scaling.type": "none"},
        ARCH.COHERE2: _cohere2,
        ARCH.FALCON: falcon,
        ARCH.STABLELM: _stablelm,
        ARCH.OLMO: _olmo,
        ARCH.OLMO2: _olmo2,
        ARCH.OLMOE: lambda c: {"attention.layer_norm_rms_epsilon": 1e-5},
        ARCH.GLM4: _glm4,
        ARCH.GLM4_MOE: _glm4_moe,
        ARCH.DOTS1: _routed,
        ARCH.ARCEE: _whole_heads_turn,
        ARCH.NEMOTRON: _nemotron,
        ARCH.EXAONE4: _olmo2,
        ARCH.STARCODER: lambda c: {
            "feed_forward_length": c["n_inner"] or 4 * c["n_embd"],
            "attention.head_count_kv": 1,
        },
        ARCH.HUNYUAN_DENSE: _hunyuan,
        ARCH.HUNYUAN_MOE: _hunyuan_moe,
        ARCH.MISTRAL3: _mistral3,
    }
    add: Callable[[Config], Config] = own.get(architecture, lambda c: {})
    return {name: value for name, value in {**keys, **add(config)}.items() if value is not None}


def _rope(config: Config) -> Config:
    given, keys = turning(config), {}
    kind = given.get("rope_type")
    if kind in ("linear", "yarn"):
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": float(given["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = given["original_max_position_embeddings"]
        for word, name in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if given.get(word) is not None:
                keys[f"rope.scaling.yarn_{name}"] = float(given[word])
    if "rope_theta" in given:
        keys["rope.freq_base"] = float(given["rope_theta"])
    if local := (config.get("rope_parameters") or {}).get("sliding_attention"):
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    return keys


def _whole_heads_turn(config: Config) -> Config:
    return {"rope.dimension_count": head_dim(config)}


def _granite(config: Config) -> Config:
    scales = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return _whole_heads_turn(config) | {name: float(config[word]) for name, word in scales.items()}


def _shared_size(config: Config, word: str) -> Config:
    return {"expert_shared_feed_forward_length": config[word]} if config.get(word) else {}


def _qwen_moe(config: Config) -> Config:
    size = {"expert_feed_forward_length": config["moe_intermediate_size"]}
    return size | _shared_size(config, "shared_expert_intermediate_size")


def _gemma2(config: Config) -> Config:
    return {
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma3(config: Config) -> Config:
    """With the pattern of windows, which llama.cpp reads, though its converter leaves it out as the usual one."""
    keys = {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": _sliding(config)}
    if cap := config.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = cap
    return keys


def _sliding(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def _phi2(config: Config) -> Config:
    turned = int(turning(config)["partial_rotary_factor"] * config["hidden_size"]) // config["num_attention_heads"]
    return {"rope.dimension_count": turned, "attention.head_count_kv": config["num_attention_heads"]}


def _phi3(config: Config) -> Config:
    given = turning(config)
    turned = int(given.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // config["num_attention_heads"]
    longest, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    keys = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": turned,
        "rope.freq_base": float(given["rope_theta"]),
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if given.get("long_factor"):
        grown = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original else 1.0
        keys["rope.scaling.attn_factor"] = grown
    return keys


def _gpt_neox(config: Config) -> Config:
    turned = int(turning(config)["partial_rotary_factor"] * head_dim(config))
    return {
        "attention.head_count_kv": None,
        "rope.dimension_count": turned,
        "use_parallel_residual": config["use_parallel_residual"],
    }


def _gpt_oss(config: Config) -> Config:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _sliding(config),  # which the converter leaves out, as the usual one
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _deepseek(config: Config) -> Config:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    keys = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turned,
        **_routed(config),
    }
    if config["q_lora_rank"] is not None:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if everywhere := turning(config).get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * everywhere
    return keys


def _glm4_moe(config: Config) -> Config:
    """With the layers that guess further tokens counted, as the converter does it also where they are missing."""
    guessing = config.get("num_nextn_predict_layers", 0)
    layers = {"block_count": config["num_hidden_layers"] + guessing, "nextn_predict_layers": guessing or None}
    return {**_glm4(config), **_routed(config), **layers}


def _routed(config: Config) -> Config:
    kinds = config.get("mlp_layer_types") or ["dense"] * config.get("first_k_dense_replace", 0)
    keys = {
        "leading_dense_block_count": kinds.count("dense"),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }
    if config.get("norm_topk_prob") or config["model_type"] in ("glm4_moe", "dots1"):
        keys["expert_weights_norm"] = config["norm_topk_prob"]
    return keys


def _nemotron(config: Config) -> Config:
    turned = int(turning(config)["partial_rotary_factor"] * config["hidden_size"]) // config["num_attention_heads"]
    scaling = {"rope.scaling.type": "none", "rope.dimension_count": turned}
    return {f"attention.layer_norm_{kind}epsilon": config["norm_eps"] for kind in ("", "rms_")} | scaling


def _hunyuan(config: Config) -> Config:
    """With the base that its scaling makes; the length of the context stays what the checkpoint says."""
    given, dim = turning(config), head_dim(config)
    if given.get("rope_type") != "dynamic":
        return {}
    base = float(given["rope_theta"] * given["alpha"] ** (dim / (dim - 2)))
    return {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def _hunyuan_moe(config: Config) -> Config:
    size = config["intermediate_size"]
    return {
        **_hunyuan(config),
        "expert_used_count": config["moe_topk"],
        "expert_feed_forward_length": size,
        "expert_shared_feed_forward_length": size,
        "expert_shared_count": 1,
    }


def _mistral3(config: Config) -> Config:
    given = turning(config)
    return {
        **_whole_heads_turn(config),
        "rope.scaling.yarn_log_multiplier": float(given["mscale_all_dim"]),
        "attention.temperature_scale": float(given["llama_4_scaling_beta"]),
    }


def _cohere2(config: Config) -> Config:
    return {
        "logit_scale": float(config["logit_scale"]),
        "rope.scaling.type": "none",
        "rope.dimension_count": head_dim(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _sliding(config),  # which the converter leaves out, as the usual one
    }


def falcon(config: Config) -> Config:
    """Return what is falcon's own, whose config.json tells its key heads in a roundabout way."""
    kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] or not config["multi_query"] else 1
    size = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
    return {
        "context_length": 2048,
        "feed_forward_length": size,
        "attention.head_count_kv": kv_heads,
        "tensor_data_layout": "jploski",
    }


def _stablelm(config: Config) -> Config:
    turned = int(turning(config)["partial_rotary_factor"] * head_dim(config))
    return {"rope.dimension_count": turned, "use_parallel_residual": config["use_parallel_residual"]}


def _olmo(config: Config) -> Config:
    clip = config.get("clip_qkv")
    return {"attention.layer_norm_epsilon": 1e-5} | ({} if clip is None else {"attention.clamp_kqv": float(clip)})


def _olmo2(config: Config) -> Config:
    if config.get("sliding_window") is None:
        return {}
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _sliding(config),
    }


def _glm4(config: Config) -> Config:
    return {"rope.dimension_count": int(head_dim(config) * turning(config)["partial_rotary_factor"])}
