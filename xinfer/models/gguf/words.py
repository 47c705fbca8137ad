"""What the keys of GGUF files are called in config.json, and how those are translated that need more than another name.

Keys are those of llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion`); what a file leaves out
because all models of its kind have it, is what llama.cpp's `src/models` has.
"""

__all__ = [
    "FEED_FORWARD",
    "LAYER_NORM",
    "LOCAL_EXPERTS",
    "SCALED",
    "SCALES",
    "USUAL",
    "cohere",
    "falcon",
    "falcon_layer",
    "gemma2",
    "gemma3",
    "granite",
    "growing",
    "llama",
    "llama_type",
    "mistral3_type",
    "parallel",
    "phi3",
    "qwen_window",
    "seed_oss",
    "sliding",
    "stablelm",
    "starcoder2",
    "window",
]

from collections.abc import Callable, Mapping

from xinfer.models.gguf.architecture import Config
from xinfer.models.gguf.keys import Keys
from xinfer.models.gguf.layouts import LAYER
from xinfer.models.names import Target

_MAX_LAYERS = 1001  # one more than families accept

RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
FEED_FORWARD = {"feed_forward_length": "intermediate_size"}
USUAL = {**RMS, **FEED_FORWARD}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps", **FEED_FORWARD}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
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


def seed_oss(keys: Keys) -> Config:
    """Return which projections have biases."""
    own = {"attention_bias": "attn_q", "attention_out_bias": "attn_output"}
    return {word: f"blk.0.{name}.bias" in keys.tensors for word, name in own.items()}
