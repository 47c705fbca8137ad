"""GGUF files made from checkpoints as llama.cpp's converter makes them, keys, names and layouts; for tests.

Nothing here looks at how xinfer reads such files: names are translated by the `gguf` package's own tables, the rest is
what `conversion` in https://github.com/ggml-org/llama.cpp does. `tests/data/make_gguf_tokens.py` compares both. Needs
`transformers`, which knows what a config.json leaves out.
"""

__all__ = ["ARCHITECTURES", "GGUF_SHAPES", "convert", "gguf_shape"]

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH as ARCH
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.numpy import load_file

from xinfer.testing.shapes import shape

Config = dict[str, Any]
Array = NDArray[Any]
Named = Iterator[tuple[str, Array]]

ARCHITECTURES: dict[str, ARCH] = {
    "llama": ARCH.LLAMA,
    "mistral": ARCH.LLAMA,
    "mixtral": ARCH.LLAMA,
    "qwen2": ARCH.QWEN2,
    "qwen2_moe": ARCH.QWEN2MOE,
    "qwen3": ARCH.QWEN3,
    "qwen3_moe": ARCH.QWEN3MOE,
    "gemma": ARCH.GEMMA,
    "gemma2": ARCH.GEMMA2,
    "gemma3_text": ARCH.GEMMA3,
    "phi": ARCH.PHI2,
    "phi3": ARCH.PHI3,
    "gpt2": ARCH.GPT2,
    "gpt_neox": ARCH.GPTNEOX,
    "gpt_oss": ARCH.GPT_OSS,
    "deepseek_v2": ARCH.DEEPSEEK2,
    "deepseek_v3": ARCH.DEEPSEEK2,
    "cohere": ARCH.COMMAND_R,
    "cohere2": ARCH.COHERE2,
    "falcon": ARCH.FALCON,
    "stablelm": ARCH.STABLELM,
    "starcoder2": ARCH.STARCODER2,
    "olmo": ARCH.OLMO,
    "olmo2": ARCH.OLMO2,
    "olmo3": ARCH.OLMO2,
    "olmoe": ARCH.OLMOE,
    "granite": ARCH.GRANITE,
    "granitemoe": ARCH.GRANITE_MOE,
    "granitemoeshared": ARCH.GRANITE_MOE,
    "smollm3": ARCH.SMOLLM3,
    "glm4": ARCH.GLM4,
    "glm4_moe": ARCH.GLM4_MOE,
    "glm4_moe_lite": ARCH.DEEPSEEK2,
    "dots1": ARCH.DOTS1,
    "arcee": ARCH.ARCEE,
    "seed_oss": ARCH.SEED_OSS,
    "nemotron": ARCH.NEMOTRON,
    "exaone4": ARCH.EXAONE4,
    "ernie4_5": ARCH.ERNIE4_5,
    "gpt_bigcode": ARCH.STARCODER,
    "hunyuan_v1_dense": ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": ARCH.HUNYUAN_MOE,
    "ministral3": ARCH.MISTRAL3,
}

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


def _as_it_is(name: str, tensor: Array) -> Iterable[tuple[str, Array]]:
    return [(name, tensor)]


def convert(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    rewrite: Callable[[str, Array], Iterable[tuple[str, Array]]] = _as_it_is,
) -> Path:
    """Write the model in a folder in Hugging Face layout as a GGUF file, and return its path.

    Args:
        folder: what is converted.
        path: what is written; it has no vocabulary, only its size.
        kind: type of all matrices whose rows are whole blocks of it, but of routers and other small ones.
        keys: changes to the architecture's keys; None takes one away.
        rewrite: what becomes of a tensor at last, by the file's name for it.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).to_dict()
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_tokenizer_model("none")
    for name, value in {**_keys(config, architecture), **(keys or {})}.items():
        if value is not None:
            _add(writer, f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name}", value)
    names = gguf.get_tensor_name_map(architecture, _first(config, "num_hidden_layers", "n_layer"))
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    for name, tensor in _laid_out(tensors, config):
        found = name if name.startswith("rope_") else names.get_name(name, (".weight", ".bias"))
        if found is None:
            raise ValueError(f"llama.cpp has no place for {name}")
        for final, values in rewrite(found, tensor):
            _add_tensor(writer, final, np.ascontiguousarray(values), GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Array, kind: GGMLQuantizationType) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.ndim == 1 or "ffn_gate_inp" in name or "_norm" in name or tensor.shape[-1] % block:
        kind = GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)


def _first(config: Config, *words: str) -> Any:
    """Return the first of these words' value that is there, None if none is."""
    return next((config[word] for word in words if word in config), None)


# --- keys ------------------------------------------------------------------------------------------------------------

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


def _keys(config: Config, architecture: ARCH) -> Config:
    values = {name: _first(config, *words) for name, words in _WORDS.items()}
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
        ARCH.FALCON: _falcon,
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


def _head_dim(config: Config) -> int:
    heads = _first(config, "num_attention_heads", "n_head")
    dim: int = config.get("head_dim") or _first(config, "hidden_size", "n_embd") // heads
    return dim


def _turning(config: Config) -> Config:
    """Return the rope parameters of layers that see all."""
    given: Config = config.get("rope_parameters") or {}
    found: Config = given.get("full_attention", given)
    return found


def _rope(config: Config) -> Config:
    given, keys = _turning(config), {}
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
    return {"rope.dimension_count": _head_dim(config)}


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
    turned = int(_turning(config)["partial_rotary_factor"] * config["hidden_size"]) // config["num_attention_heads"]
    return {"rope.dimension_count": turned, "attention.head_count_kv": config["num_attention_heads"]}


def _phi3(config: Config) -> Config:
    given = _turning(config)
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
    turned = int(_turning(config)["partial_rotary_factor"] * _head_dim(config))
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
    if everywhere := _turning(config).get("mscale_all_dim"):
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
    turned = int(_turning(config)["partial_rotary_factor"] * config["hidden_size"]) // config["num_attention_heads"]
    scaling = {"rope.scaling.type": "none", "rope.dimension_count": turned}
    return {f"attention.layer_norm_{kind}epsilon": config["norm_eps"] for kind in ("", "rms_")} | scaling


def _hunyuan(config: Config) -> Config:
    """With the base that its scaling makes; the length of the context stays what the checkpoint says."""
    given, dim = _turning(config), _head_dim(config)
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
    given = _turning(config)
    return {
        **_whole_heads_turn(config),
        "rope.scaling.yarn_log_multiplier": float(given["mscale_all_dim"]),
        "attention.temperature_scale": float(given["llama_4_scaling_beta"]),
    }


def _cohere2(config: Config) -> Config:
    return {
        "logit_scale": float(config["logit_scale"]),
        "rope.scaling.type": "none",
        "rope.dimension_count": _head_dim(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _sliding(config),  # which the converter leaves out, as the usual one
    }


def _falcon(config: Config) -> Config:
    kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] or not config["multi_query"] else 1
    size = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
    return {
        "context_length": 2048,
        "feed_forward_length": size,
        "attention.head_count_kv": kv_heads,
        "tensor_data_layout": "jploski",
    }


def _stablelm(config: Config) -> Config:
    turned = int(_turning(config)["partial_rotary_factor"] * _head_dim(config))
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
    return {"rope.dimension_count": int(_head_dim(config) * _turning(config)["partial_rotary_factor"])}


# --- tensors ---------------------------------------------------------------------------------------------------------


_PAIRED = ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3", "arcee", "ministral3")


def _laid_out(tensors: dict[str, Array], config: Config) -> Named:
    """Yield tensors as the converter lays them out, under checkpoints' names, or those that it makes up."""
    yield from _rope_factors(config)
    changes: dict[str, Callable[[str, Array, Config], Named]] = {
        **dict.fromkeys(_PAIRED, _interleaved),
        **dict.fromkeys(("granitemoe", "granitemoeshared"), _granite_moe),
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "nemotron"), _one_more),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1"), _split_latent),
        "gpt2": _transposed,
        "gpt_oss": _split_experts,
        "gpt_neox": _fused,
        "falcon": _fused,
    }
    change = changes.get(config["model_type"])
    for name, tensor in _stacked(tensors):
        if change is None:
            yield name, tensor
        else:
            yield from change(name, tensor, config)


def _stacked(tensors: dict[str, Array]) -> Named:
    """Put experts' matrices, and norms of single heads, into one tensor each."""
    groups: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        before, inner, after = name.partition(".experts." if ".experts." in name else ".norms.")
        number, _, rest = after.partition(".")
        if not number.isdecimal():
            yield name, tensor
            continue
        joined = f"{before}{inner}{rest}" if inner == ".experts." else f"{before}.{rest}"
        groups.setdefault(joined.replace("block_sparse_moe", "mlp"), {})[int(number)] = tensor
    for name, members in groups.items():
        renamed = name.replace("experts.w1.", "experts.gate_proj.").replace("experts.w2.", "experts.down_proj.")
        yield renamed.replace("experts.w3.", "experts.up_proj."), np.stack([members[i] for i in range(len(members))])


def _rope_factors(config: Config) -> Named:
    given, dim = _turning(config), _head_dim(config) if "hidden_size" in config else 0
    if given.get("rope_type") == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        original = given["original_max_position_embeddings"]
        lengths = [2 * math.pi * given["rope_theta"] ** (i / dim) for i in range(0, dim, 2)]
        keep = [min(max((original / length - low) / (high - low), 0), 1) for length in lengths]
        yield "rope_freqs.weight", np.array([1 / ((1 - k) / given["factor"] + k) for k in keep], np.float32)
    if given.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(given["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(given["short_factor"], np.float32)


def _interleaved(name: str, tensor: Array, config: Config) -> Named:
    """Order rows so that pairs that turn together are adjacent."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is not None:
        count = config[heads]
        tensor = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _granite_moe(name: str, tensor: Array, config: Config) -> Named:
    """Part gate and up."""
    if name.endswith("input_linear.weight"):
        half = tensor.shape[-2] // 2
        before = name.removesuffix("input_linear.weight")
        before = before.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", "mlp.shared_expert")
        yield f"{before}gate_proj.weight", tensor[..., :half, :]
        yield f"{before}up_proj.weight", tensor[..., half:, :]
    else:
        yield from _interleaved(name, tensor, config)


def _one_more(name: str, tensor: Array, config: Config) -> Named:
    if name != "lm_head.weight" or config["model_type"] in ("gemma3_text", "nemotron"):
        yield name, tensor + np.float32(1) if name.endswith("norm.weight") else tensor


def _transposed(name: str, tensor: Array, config: Config) -> Named:
    if not name.endswith((".attn.bias", ".attn.masked_bias")):
        yield name, tensor.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor


def _split_experts(name: str, tensor: Array, config: Config) -> Named:
    """Part gate and up, whose rows take turns, and turn matrices round."""
    if "experts" not in name:
        yield name.replace("sinks", "sinks.weight"), tensor
        return
    kind = "bias" if name.endswith("_bias") else "weight"
    place = name.removesuffix("_bias")
    if kind == "weight":
        tensor = tensor.swapaxes(-1, -2)
    if place.endswith("gate_up_proj"):
        rows = -1 if kind == "bias" else -2
        for i, part in enumerate(("gate_proj", "up_proj")):
            taken = np.take(tensor, range(i, tensor.shape[rows], 2), rows)
            yield f"{place.replace('gate_up_proj', part)}.{kind}", taken
    else:
        yield f"{place}.{kind}", tensor


def _split_latent(name: str, tensor: Array, config: Config) -> Named:
    if name.endswith("kv_b_proj.weight"):
        nope = config["qk_nope_head_dim"]
        both = tensor.reshape(config["num_attention_heads"], nope + config["v_head_dim"], -1)
        yield name.replace("kv_b", "k_b"), both[:, :nope].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), both[:, nope:]
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _fused(name: str, tensor: Array, config: Config) -> Named:
    """Gather queries, keys and values, which take turns by key heads."""
    if "query_key_value" in name:
        heads, dim = config["num_attention_heads"], _head_dim(config)
        kv_heads = heads if config["model_type"] == "gpt_neox" else _falcon(config)["attention.head_count_kv"]
        groups = tensor.reshape(kv_heads, heads // kv_heads + 2, dim, -1)
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        tensor = np.concatenate([part.reshape(-1, groups.shape[-1]) for part in parts]).reshape(tensor.shape)
    yield name, tensor
