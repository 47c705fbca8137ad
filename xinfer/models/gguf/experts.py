"""As `words`, of models with experts, and of latent attention, which those of DeepSeek's kind have too."""

__all__ = [
    "EXPERTS",
    "ROUTED",
    "deepseek",
    "deepseek_sharpening",
    "deepseek_type",
    "experts_normed",
    "gpt_oss",
    "granite_moe",
    "granite_moe_type",
    "hunyuan_moe",
    "latent_heads",
    "qwen2_moe",
    "qwen3_moe",
    "sigmoid_experts",
]

from collections.abc import Callable

from xinfer.models.gguf.architecture import Config
from xinfer.models.gguf.keys import Keys
from xinfer.models.gguf.words import granite, qwen_window, sliding

EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
}


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
