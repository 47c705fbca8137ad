"""The architectures of GGUF files that can be translated, a table entry each.

Keys, names and layouts are those of llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion`); what a
file leaves out because all models of its kind have it, is what llama.cpp's `src/models` has.
"""

__all__ = ["ARCHITECTURES", "LAYER", "TOP", "Architecture", "pairs"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xinfer.models.gguf_keys import Keys
from xinfer.models.names import Stored, Target

Config = dict[str, Any]
Undo = Callable[[Tensor, Config], Tensor]

_MAX_LAYERS = 1001  # one more than families accept

TOP: dict[str, Target] = {
    "token_embd": "embed",
    "position_embd": "positions",
    "output_norm": "norm",
    "output": "head",
    "rope_freqs.weight": None,  # these are read with the keys
    "rope_factors_long.weight": None,
    "rope_factors_short.weight": None,
}
# What a tensor of a layer is, in all architectures but those that say otherwise.
LAYER: dict[str, Target] = {
    "attn_norm": "attn_norm",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
    "attn_qkv": Stored(("attn.q", "attn.k", "attn.v")),
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_sinks.weight": "attn.sinks",
    "attn_q_a": "attn.q_a",
    "attn_q_a_norm": "attn.q_a_norm",
    "attn_q_b": "attn.q_b",
    "attn_kv_a_mqa": "attn.kv_a",
    "attn_kv_a_norm": "attn.kv_a_norm",
    "attn_kv_b": Stored(("attn.k_b", "attn.v_b"), interleaved="heads"),
    "attn_k_b": "attn.k_b",
    "attn_v_b": "attn.v_b",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "ffn_gate_inp": "mlp.router",
    "exp_probs_b.bias": "mlp.router.correction",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_down_exps": "mlp.experts.down",
    "ffn_gate_up_exps": Stored(("mlp.experts.gate", "mlp.experts.up")),
    "ffn_gate.*": "mlp.experts.gate",  # of files from before April 2024
    "ffn_up.*": "mlp.experts.up",
    "ffn_down.*": "mlp.experts.down",
    "ffn_gate_shexp": "mlp.shared.gate",
    "ffn_up_shexp": "mlp.shared.up",
    "ffn_down_shexp": "mlp.shared.down",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
}


def _nothing(keys: Keys) -> Config:
    return {}


def _sharpening(multiplier: float) -> Config:
    return {"mscale": 1.0, "mscale_all_dim": multiplier}


def grouped_heads(keys: Keys) -> Config:
    """Return the shape of grouped-query attention.

    What a file may leave out: `head_count_kv` is `head_count`, `attention.key_length` the embedding's share of a head.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        keys.demand(name, head_dim, why=": queries, keys and values must be as wide as each other")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's files are translated to the config.json and the canonical names of a family.

    Attributes:
        name: what `general.architecture` says.
        model_type: the family, or what tells it from the keys.
        words: from keys to config.json's words, all needed.
        optional: those of which a file may say nothing, and config.json then says nothing either.
        fixed: what config.json says for all such files; the words above go before.
        more: further words, which need more than renaming; they go before all others.
        heads: the words for heads and their widths.
        partial: whether a part of each head may be without positions; what config.json calls the turned share.
        turned: what config.json's rope scaling says besides, of all such files that have one.
        sharpening: what config.json's yarn says for a `yarn_log_multiplier`.
        layer, top: what tensors are.
        undo: what puts a tensor into the family's order, by its name in a layer or at the top.
    """

    name: str
    model_type: str | Callable[[Keys], str]
    words: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Keys], Config] = _nothing
    heads: Callable[[Keys], Config] = grouped_heads
    partial: str | None = None
    turned: Mapping[str, Any] = field(default_factory=dict)
    sharpening: Callable[[float], Config] = _sharpening
    layer: Mapping[str, Target] = field(default_factory=lambda: LAYER)
    top: Mapping[str, Target] = field(default_factory=lambda: TOP)
    undo: Mapping[str, Undo] = field(default_factory=dict)


# --- what converters did to tensors ----------------------------------------------------------------------------------


def pairs(heads: str) -> Undo:
    """Undo the interleaving of the two halves of each head's rows; `heads` is config.json's word for their number."""
    return lambda tensor, config: _half_split(tensor, config[heads])


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def _pairs_in_fused(tensor: Tensor, config: Config) -> Tensor:
    """The same where queries, keys and values are one tensor."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    turned = tensor.shape[0] // (heads + 2 * kv_heads) * (heads + kv_heads)
    return torch.cat([_half_split(tensor[:turned], heads + kv_heads), tensor[turned:]])


def _less_one(tensor: Tensor, config: Config) -> Tensor:
    """Return w of a stored 1 + w."""
    return tensor.float() - 1


PAIRS: dict[str, Undo] = {
    "attn_q": pairs("num_attention_heads"),
    "attn_k": pairs("num_key_value_heads"),
    "attn_qkv": _pairs_in_fused,
}
_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
LESS_ONE: dict[str, Undo] = dict.fromkeys(_NORMS, _less_one)
PER_HEAD: dict[str, Undo] = {
    "attn_k_b": lambda tensor, config: tensor.transpose(-1, -2).flatten(0, -2) if tensor.ndim == 3 else tensor,
    "attn_v_b": lambda tensor, config: tensor.flatten(0, -2),
}

# --- what needs more than a word -------------------------------------------------------------------------------------

RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
FEED_FORWARD = {"feed_forward_length": "intermediate_size"}
USUAL = {**RMS, **FEED_FORWARD}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


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


def _qwen_window(keys: Keys) -> Config:
    """A window that a file has is every layer's."""
    window = _window(keys)
    return {} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _qwen3_moe(keys: Keys) -> Config:
    keys.demand("expert_gating_func", 1)
    size = keys.get("feed_forward_length", 0) // max(1, keys.integer("expert_used_count"))
    return {
        **_qwen_window(keys),
        "moe_intermediate_size": keys.get("expert_feed_forward_length", size),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
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
    """Tell V2, whose experts a softmax scores, from V3, where a sigmoid does."""
    keys.demand("expert_gating_func", 1, 2)
    return "deepseek_v3" if keys.get("expert_gating_func", 1) == 2 else "deepseek_v2"


def _deepseek(keys: Keys) -> Config:
    groups = keys.get("expert_group_count", 1) or 1
    return {
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count", groups) or groups,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0) or 1.0,
        "n_shared_experts": keys.get("expert_shared_count", 0),
    }


def _deepseek_sharpening(multiplier: float) -> Config:
    """Its converter writes a tenth, and leaves out `mscale`, which is the same in all its models."""
    return {"mscale": multiplier * 10, "mscale_all_dim": multiplier * 10}


# --- the table -------------------------------------------------------------------------------------------------------

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", _llama_type, USUAL, more=_llama, undo=PAIRS),
    Architecture("mistral3", _llama_type, USUAL, more=_llama, undo=PAIRS),
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
        {"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        more=_gemma3,
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
        turned={"truncate": False},
        layer={**LAYER, "post_attention_norm": "mlp_norm"},
    ),
    Architecture(
        "deepseek2",
        _deepseek_type,
        {
            **USUAL,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        fixed={"rope_interleave": True},
        more=_deepseek,
        heads=latent_heads,
        sharpening=_deepseek_sharpening,
        undo=PER_HEAD,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        {"attention.layer_norm_epsilon": "layer_norm_eps", **FEED_FORWARD, "logit_scale": "logit_scale"},
        more=_sliding(4),
    ),
)
