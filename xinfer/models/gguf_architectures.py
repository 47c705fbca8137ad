"""The architectures of GGUF files that can be translated, a table entry each.

Keys are those of llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion`); what a file leaves out
because all models of its kind have it, is what llama.cpp's `src/models` has.
"""

__all__ = ["ARCHITECTURES"]

from collections.abc import Callable, Mapping

from xinfer.models.gguf_architecture import LAYER, LESS_ONE, ONE_ROW, PAIRS, PER_HEAD, Architecture, Config
from xinfer.models.gguf_keys import Keys
from xinfer.models.names import Stored, Target

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


def _window(keys: Keys) -> int | None:
    """Return the sliding window; 0 says that there is none."""
    return keys.get("attention.sliding_window", 0) or None


def _sliding(period: int, default: int | None = None) -> Callable[[Keys], Config]:
    """Return what tells the layers with a window: all but each `period`-th, unless the file says it otherwise."""

    def more(keys: Keys) -> Config:
        window, layers = _window(keys) or default, min(keys.integer("block_count"), _MAX_LAYERS)
        if window is None:
            return {"sliding_window": None}
        sliding = keys.listed("attention.sliding_window_pattern")
        if sliding is None:
            every = int(keys.number("attention.sliding_window_pattern", period))
            sliding = [every == 0 or i % every < every - 1 for i in range(layers)]
        kinds = ["sliding_attention" if here else "full_attention" for here in sliding]
        return {"sliding_window": window, "layer_types": kinds}

    return more


def _llama_type(keys: Keys) -> str:
    if keys.get("expert_count", 0):
        return "mixtral"
    return "llama" if _window(keys) is None else "mistral"


def _llama(keys: Keys) -> Config:
    words: Config = {"sliding_window": _window(keys)}
    if keys.get("expert_count", 0):
        keys.demand("expert_feed_forward_length", keys.get("feed_forward_length"))
        keys.demand("expert_gating_func", 1)
        words |= {word: keys.get(name) for name, word in LOCAL_EXPERTS.items()}
    return words


def _mistral3_type(keys: Keys) -> str:
    return "ministral3" if "attention.temperature_scale" in keys else _llama_type(keys)


def _growing(keys: Keys) -> Config:
    growth = keys.number("attention.temperature_scale", 0.0)
    return {"llama_4_scaling_beta": growth} if growth else {}


def _qwen_window(keys: Keys) -> Config:
    """A window that a file has is every layer's."""
    window = _window(keys)
    return {} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _experts_normed(usual: bool) -> Callable[[Keys], Config]:
    """Return what tells whether weights of experts are made to sum to one; few files say it."""

    def more(keys: Keys) -> Config:
        keys.demand("expert_gating_func", 1)
        return {"norm_topk_prob": bool(keys.get("expert_weights_norm", usual))}

    return more


def _qwen2_moe(keys: Keys) -> Config:
    return {**_experts_normed(False)(keys), "qkv_bias": "blk.0.attn_q.bias" in keys.tensors}


def _qwen3_moe(keys: Keys) -> Config:
    size = keys.get("feed_forward_length", 0) // max(1, keys.integer("expert_used_count"))
    return {
        **_qwen_window(keys),
        **_experts_normed(True)(keys),
        "moe_intermediate_size": keys.get("expert_feed_forward_length", size),
    }


def _gemma_scale(largest: int) -> Callable[[Keys], Config]:
    """Return what tells the scale of scores, which no file says: of models with so many layers it is another."""

    def more(keys: Keys) -> Config:
        share = keys.integer("embedding_length") // keys.integer("attention.head_count")
        width = keys.integer("attention.key_length", max(1, share))
        return {"query_pre_attn_scalar": share if keys.integer("block_count") == largest else width}

    return more


def _gemma2(keys: Keys) -> Config:
    return _sliding(2, 4096)(keys) | _gemma_scale(46)(keys)


def _gemma3(keys: Keys) -> Config:
    return _sliding(6)(keys) | _gemma_scale(62)(keys)


def _phi3(keys: Keys) -> Config:
    return {"sliding_window": _window(keys)}


def _parallel(keys: Keys) -> Config:
    return {"use_parallel_residual": bool(keys.get("use_parallel_residual"))}


def _stablelm(keys: Keys) -> Config:
    return {
        **_parallel(keys),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def _falcon(keys: Keys) -> Config:
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


def _falcon_layer(keys: Keys) -> Mapping[str, Target]:
    """Return what norms are: the first one in a file is the second part's where each part has its own."""
    two = "blk.0.attn_norm_2.weight" in keys.tensors
    return {**LAYER, "attn_norm": "mlp_norm", "attn_norm_2": "attn_norm"} if two else LAYER


def _starcoder2(keys: Keys) -> Config:
    return {"sliding_window": _window(keys), "use_bias": "blk.0.attn_q.bias" in keys.tensors}


def _cohere(keys: Keys) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors}


def _granite(keys: Keys) -> Config:
    """Where others' positions were not tuned for a longer context, llama.cpp has none at all for this one."""
    keys.demand("rope.scaling.finetuned", True, why=": it would take positions away")
    return {}


def _granite_moe(keys: Keys) -> Config:
    keys.demand("expert_gating_func", 1)
    shared = keys.get("expert_shared_feed_forward_length", 0)
    return {**_granite(keys), **({"shared_intermediate_size": shared} if shared else {})}


def _granite_moe_type(keys: Keys) -> str:
    return "granitemoeshared" if keys.get("expert_shared_feed_forward_length", 0) else "granitemoe"


def _gpt_oss(keys: Keys) -> Config:
    keys.demand("expert_gating_func", 3)
    return _sliding(2)(keys)


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


def _deepseek_type(keys: Keys) -> str:
    """Tell V2, whose experts a softmax scores, from V3, where a sigmoid does; old files and GLM-4.7's don't say it."""
    keys.demand("expert_gating_func", 1, 2)
    is_glm = keys.get("block_count") in (47, 48) and keys.get("vocab_size", 0) == 154_880
    return "deepseek_v3" if keys.get("expert_gating_func", 2 if is_glm else 1) == 2 else "deepseek_v2"


def _deepseek(keys: Keys) -> Config:
    words = _routed(keys)
    if _deepseek_type(keys) == "deepseek_v2":
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


def _sigmoid_experts(keys: Keys) -> Config:
    keys.demand("expert_gating_func", 2)
    return {**_routed(keys), "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors, "sliding_window": None}


def _seed_oss(keys: Keys) -> Config:
    own = {"attention_bias": "attn_q", "attention_out_bias": "attn_output"}
    return {word: f"blk.0.{name}.bias" in keys.tensors for word, name in own.items()}


def _hunyuan_moe(keys: Keys) -> Config:
    """All parts are as wide as each other, and one computes all tokens."""
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        keys.demand(name, keys.get("feed_forward_length"))
    keys.demand("expert_shared_count", 1)
    keys.demand("expert_gating_func", 1)
    return {}


def _deepseek_sharpening(multiplier: float) -> Config:
    """Its converter writes a tenth, and leaves out `mscale`, which is the same in all its models."""
    return {"mscale": multiplier * 10, "mscale_all_dim": multiplier * 10}


# --- the table -------------------------------------------------------------------------------------------------------

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", _llama_type, USUAL, more=_llama, undo=PAIRS),
    Architecture("mistral3", _mistral3_type, USUAL, more=_llama, turned=_growing, undo=PAIRS),
    Architecture("qwen2", "qwen2", USUAL, more=_qwen_window),
    Architecture("qwen3", "qwen3", USUAL, more=_qwen_window),
    Architecture("qwen3moe", "qwen3_moe", {**USUAL, **EXPERTS}, more=_qwen3_moe),
    Architecture(
        "gemma2",
        "gemma2",
        USUAL,
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=_gemma2,
        undo=LESS_ONE,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        USUAL,
        {"final_logit_softcapping": "final_logit_softcapping"},
        more=_gemma3,
        local_base=lambda base: 10_000.0,
        undo=LESS_ONE,
    ),
    Architecture(
        "phi3",
        "phi3",
        USUAL,
        more=_phi3,
        partial="partial_rotary_factor",
        layer={**LAYER, "ffn_up": Stored(("mlp.gate", "mlp.up"))},
    ),
    Architecture(
        "gpt2",
        "gpt2",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        {**USUAL, **LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        more=_gpt_oss,
        turned=lambda keys: {"truncate": False},
        layer={**LAYER, "post_attention_norm": "mlp_norm"},
    ),
    Architecture(
        "deepseek2",
        _deepseek_type,
        {**USUAL, **ROUTED},
        fixed={"rope_interleave": True},
        more=_deepseek,
        heads=latent_heads,
        sharpening=_deepseek_sharpening,
        undo=PER_HEAD,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        {**LAYER_NORM, "logit_scale": "logit_scale"},
        more=_sliding(4),
    ),
    Architecture("command-r", "cohere", {**LAYER_NORM, "logit_scale": "logit_scale"}, more=_cohere),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        {
            **USUAL,
            **EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        more=_qwen2_moe,
        undo=ONE_ROW,
    ),
    Architecture("gemma", "gemma", USUAL, undo=LESS_ONE),
    Architecture("phi2", "phi", LAYER_NORM, partial="partial_rotary_factor"),
    Architecture("gptneox", "gpt_neox", LAYER_NORM, more=_parallel, partial="rotary_pct", base="rotary_emb_base"),
    Architecture(
        "falcon",
        "falcon",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        more=_falcon,
        layer=_falcon_layer,
    ),
    Architecture("stablelm", "stablelm", LAYER_NORM, more=_stablelm, partial="partial_rotary_factor"),
    Architecture(
        "starcoder2",
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon", **FEED_FORWARD},
        more=_starcoder2,
    ),
    Architecture("olmo", "olmo", FEED_FORWARD, {"attention.clamp_kqv": "clip_qkv"}, undo=PAIRS),
    Architecture(
        "olmo2",
        lambda keys: "olmo2" if _window(keys) is None else "olmo3",
        USUAL,
        more=_sliding(4),
        local_base=lambda base: base,
    ),
    Architecture("olmoe", "olmoe", {**USUAL, **EXPERTS}, more=_experts_normed(False)),
    Architecture("granite", "granite", {**USUAL, **SCALED}, SCALES, more=_granite, undo=PAIRS),
    Architecture(
        "granitemoe",
        _granite_moe_type,
        {**USUAL, **LOCAL_EXPERTS, **SCALED},
        SCALES,
        more=_granite_moe,
        undo=PAIRS,
    ),
    Architecture("smollm3", "smollm3", USUAL, undo=PAIRS),
    Architecture(
        "glm4",
        "glm4",
        USUAL,
        partial="partial_rotary_factor",
        layer={**LAYER, "ffn_up": Stored(("mlp.gate", "mlp.up"))},
    ),
    Architecture(
        "glm4moe",
        "glm4_moe",
        {**USUAL, **ROUTED},
        more=_sigmoid_experts,
        partial="partial_rotary_factor",
        layer={**LAYER, "post_attention_norm": "mlp_norm"},
    ),
    Architecture("dots1", "dots1", {**USUAL, **ROUTED}, more=_sigmoid_experts),
    Architecture("arcee", "arcee", USUAL, undo=PAIRS),
    Architecture("seed_oss", "seed_oss", USUAL, more=_seed_oss, layer={**LAYER, "post_attention_norm": "mlp_norm"}),
    Architecture(
        "nemotron",
        "nemotron",
        {"attention.layer_norm_epsilon": "norm_eps", **FEED_FORWARD},
        partial="partial_rotary_factor",
        undo=LESS_ONE,
    ),
    Architecture("exaone4", "exaone4", USUAL, more=_sliding(4)),
    Architecture("ernie4_5", "ernie4_5", USUAL, more=lambda keys: {"use_bias": "blk.0.attn_q.bias" in keys.tensors}),
    Architecture(
        "starcoder",
        "gpt_bigcode",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
        more=lambda keys: {"multi_query": keys.get("attention.head_count_kv", 1) == 1},
    ),
    Architecture("hunyuan-dense", "hunyuan_v1_dense", USUAL),
    Architecture(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        {**USUAL, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        more=_hunyuan_moe,
    ),
)
