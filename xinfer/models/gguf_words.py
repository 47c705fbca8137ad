"""What the keys of GGUF files are called in config.json, and how those are translated that need more than another name.

Keys are those of llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion`); what a file leaves out
because all models of its kind have it, is what llama.cpp's `src/models` has.
"""

__all__ = [
    "EXPERTS",
    "FEED_FORWARD",
    "LAYER_NORM",
    "LOCAL_EXPERTS",
    "ROUTED",
    "SCALED",
    "SCALES",
    "USUAL",
    "cohere",
    "deepseek",
    "deepseek_sharpening",
    "deepseek_type",
    "experts_normed",
    "falcon",
    "falcon_layer",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "granite",
    "granite_moe",
    "granite_moe_type",
    "growing",
    "hunyuan_moe",
    "latent_heads",
    "llama",
    "llama_type",
    "mistral3_type",
    "parallel",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen_window",
    "seed_oss",
    "sigmoid_experts",
    "sliding",
    "stablelm",
    "starcoder2",
    "window",
]

from collections.abc import Callable, Mapping

from xinfer.models.gguf_architecture import LAYER, Config
from xinfer.models.gguf_keys import Keys
from xinfer.models.names import Target

_MAX_LAYERS = 1001  # one more than families accept

RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
FEED_FORWARD = {"feed_forward_length": "intermediate_size"}
USUAL = {**RMS, **FEED_FORWARD}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps", **FEED_FORWARD}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
}
SCALED = {"logit_scale": "logits_scaling"}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}


def window(keys: Keys) -> int | None:
    """Return the sliding window; 0 says that there is none."""
    return keys.get("attention.sliding_window", 0) or None


def sliding(period: int, default: int | None = None) -> Callable[[Keys], Config]:
    """Return what tells the layers with a window: all but each `period`-th, unless the file says it otherwise."""

    def more(keys: Keys) -> Config:
        width, layers = window(keys) or default, min(keys.integer("block_count"), _MAX_LAYERS)
        if width is None:
            return {"sliding_window": None}
        windowed = keys.listed("attention.sliding_window_pattern")
        if windowed is None:
            every = keys.integer("attention.sliding_window_pattern", period, least=0)
            windowed = [every == 0 or i % every < every - 1 for i in range(layers)]
        kinds = ["sliding_attention" if here else "full_attention" for here in windowed]
        return {"sliding_window": width, "layer_types": kinds}

    return more


def llama_type(keys: Keys) -> str:
    """Tell which of those that are called llama it is."""
    if keys.get("expert_count", 0):
        return "mixtral"
    return "llama" if window(keys) is None else "mistral"


def llama(keys: Keys) -> Config:
    """Return the window, and what experts there are: each as large as others' only part."""
    words: Config = {"sliding_window": window(keys)}
    if keys.get("expert_count", 0):
        keys.demand("expert_feed_forward_length", keys.get("feed_forward_length"))
        keys.demand("expert_gating_func", 1)
        words |= {word: keys.get(name) for name, word in LOCAL_EXPERTS.items()}
    return words


def mistral3_type(keys: Keys) -> str:
    """Tell Ministral 3, whose queries grow, from a mistral."""
    return "ministral3" if "attention.temperature_scale" in keys else llama_type(keys)


def growing(keys: Keys) -> Config:
    """Return how queries grow with the length of the context."""
    growth = keys.number("attention.temperature_scale", 0.0)
    return {"llama_4_scaling_beta": growth} if growth else {}


def qwen_window(keys: Keys) -> Config:
    """A window that a file has is every layer's."""
    width = window(keys)
    return {} if width is None else {"sliding_window": width, "use_sliding_window": True, "max_window_layers": 0}


def experts_normed(usual: bool) -> Callable[[Keys], Config]:
    """Return what tells whether weights of experts are made to sum to one; few files say it."""

    def more(keys: Keys) -> Config:
        keys.demand("expert_gating_func", 1)
        return {"norm_topk_prob": bool(keys.get("expert_weights_norm", usual))}

    return more


def qwen2_moe(keys: Keys) -> Config:
    """Return how experts are weighed, and whether there are biases."""
    return {**experts_normed(False)(keys), "qkv_bias": "blk.0.attn_q.bias" in keys.tensors}


def qwen3_moe(keys: Keys) -> Config:
    """Return how experts are weighed, and their size, which old files leave out."""
    if "expert_feed_forward_length" in keys:
        size = keys.get("expert_feed_forward_length")
    else:
        size = keys.integer("feed_forward_length") // keys.integer("expert_used_count")
    return {
        **qwen_window(keys),
        **experts_normed(True)(keys),
        "moe_intermediate_size": size,
    }


def _gemma_scale(largest: int) -> Callable[[Keys], Config]:
    """Return what tells the scale of scores, which no file says: of models with so many layers it is another."""

    def more(keys: Keys) -> Config:
        share = keys.integer("embedding_length") // keys.integer("attention.head_count")
        width = keys.integer("attention.key_length", max(1, share))
        return {"query_pre_attn_scalar": share if keys.integer("block_count") == largest else width}

    return more


def gemma2(keys: Keys) -> Config:
    """Return windows, in every other layer, and the scale of scores."""
    return sliding(2, 4096)(keys) | _gemma_scale(46)(keys)


def gemma3(keys: Keys) -> Config:
    """Return windows, in five of six layers, and the scale of scores."""
    return sliding(6)(keys) | _gemma_scale(62)(keys)


def phi3(keys: Keys) -> Config:
    """Return the window of all layers; 0 says that there is none."""
    return {"sliding_window": window(keys)}


def parallel(keys: Keys) -> Config:
    """Return whether both parts are computed at once."""
    return {"use_parallel_residual": bool(keys.get("use_parallel_residual"))}


def stablelm(keys: Keys) -> Config:
    """Return what tensors tell of norms and biases."""
    return {
        **parallel(keys),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def falcon(keys: Keys) -> Config:
    """Tell the first kind, with one key head, from the later ones, of which some have a norm for each part."""
    kv_heads, norms = keys.get("attention.head_count_kv", 1), "blk.0.attn_norm_2.weight" in keys.tensors
    grouped = norms or kv_heads != 1
    return {
        "bias": "blk.0.attn_qkv.bias" in keys.tensors,
        "multi_query": not grouped,
        "new_decoder_architecture": grouped,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if norms else 1,
    }


def falcon_layer(keys: Keys) -> Mapping[str, Target]:
    """Return what norms are: the first one in a file is the second part's where each part has its own."""
    two = "blk.0.attn_norm_2.weight" in keys.tensors
    return {**LAYER, "attn_norm": "mlp_norm", "attn_norm_2": "attn_norm"} if two else LAYER


def starcoder2(keys: Keys) -> Config:
    """Return the window of all layers, and whether there are biases."""
    return {"sliding_window": window(keys), "use_bias": "blk.0.attn_q.bias" in keys.tensors}


def cohere(keys: Keys) -> Config:
    """Return whether heads are normalized."""
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors}


def granite(keys: Keys) -> Config:
    """Where others' positions were not tuned for a longer context, llama.cpp has none at all for this one."""
    keys.demand("rope.scaling.finetuned", True, why=": it would take positions away")
    return {}


def granite_moe(keys: Keys) -> Config:
    """Return the size of the part for all tokens, if there is one."""
    keys.demand("expert_gating_func", 1)
    shared = keys.get("expert_shared_feed_forward_length", 0)
    return {**granite(keys), **({"shared_intermediate_size": shared} if shared else {})}


def granite_moe_type(keys: Keys) -> str:
    """Tell whether a part computes all tokens."""
    return "granitemoeshared" if keys.get("expert_shared_feed_forward_length", 0) else "granitemoe"


def gpt_oss(keys: Keys) -> Config:
    """Return windows, in every other layer."""
    keys.demand("expert_gating_func", 3)
    return sliding(2)(keys)


def latent_heads(keys: Keys) -> Config:
    """Return the shape of latent attention; older files give the widths of keys and values under their plain names."""
    old = "attention.key_length_mla" not in keys
    width = keys.integer("attention.key_length" if old else "attention.key_length_mla")
    value = keys.integer("attention.value_length" if old else "attention.value_length_mla")
    rank, turned = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    heads = keys.integer("attention.head_count")
    if not old:
        keys.demand("attention.key_length", rank + turned)
        keys.demand("attention.value_length", rank)
    keys.demand("attention.head_count_kv", 1, heads)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.get("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": width - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
    }


def deepseek_type(keys: Keys) -> str:
    """Tell V2, whose experts a softmax scores, from V3, where a sigmoid does; old files and GLM-4.7's don't say it."""
    keys.demand("expert_gating_func", 1, 2)
    is_glm = keys.get("block_count") in (47, 48) and keys.get("vocab_size", 0) == 154_880
    return "deepseek_v3" if keys.get("expert_gating_func", 2 if is_glm else 1) == 2 else "deepseek_v2"


def deepseek(keys: Keys) -> Config:
    """Return how experts are chosen and weighed."""
    words = _routed(keys)
    if deepseek_type(keys) == "deepseek_v2":
        words["topk_method"] = "greedy" if words["n_group"] == 1 else "group_limited_greedy"
    return words


def _routed(keys: Keys) -> Config:
    groups = keys.get("expert_group_count", 1) or 1
    return {
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count", groups) or groups,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0) or 1.0,
        "n_shared_experts": keys.get("expert_shared_count", 0),
    }


def sigmoid_experts(keys: Keys) -> Config:
    """Return how experts are chosen and weighed, and whether heads are normalized."""
    keys.demand("expert_gating_func", 2)
    return {**_routed(keys), "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors, "sliding_window": None}


def seed_oss(keys: Keys) -> Config:
    """Return which projections have biases."""
    own = {"attention_bias": "attn_q", "attention_out_bias": "attn_output"}
    return {word: f"blk.0.{name}.bias" in keys.tensors for word, name in own.items()}


def hunyuan_moe(keys: Keys) -> Config:
    """All parts are as wide as each other, and one computes all tokens."""
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        keys.demand(name, keys.get("feed_forward_length"))
    keys.demand("expert_shared_count", 1)
    keys.demand("expert_gating_func", 1)
    return {}


def deepseek_sharpening(multiplier: float) -> Config:
    """Its converter writes a tenth, and leaves out `mscale`, which is the same in all its models."""
    return {"mscale": multiplier * 10, "mscale_all_dim": multiplier * 10}
