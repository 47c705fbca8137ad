"""Llama 2 and 3, and everything built like it: SmolLM, TinyLlama, Yi, ..."""

__all__ = ["rename", "spec"]

from dataclasses import replace
from typing import Any

from xinfer.errors import ModelError
from xinfer.models.families import Config
from xinfer.models.families._fields import flag, integer, number, refuse, rope
from xinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_MAX_LAYERS = 1000  # of a damaged file there could be billions


def spec(config: Config) -> DecoderSpec:
    """Describe a llama; `attention_bias` puts biases on all four attention projections."""
    refuse(config, "hidden_act", "silu", "swish")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads, head_dim = integer(config, "num_key_value_heads", heads), integer(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    layers = integer(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers={layers}, but at most {_MAX_LAYERS} are expected")
    bias = flag(config, "attention_bias")
    attention = AttentionSpec(heads, kv_heads, head_dim, rope(config, head_dim), bias, bias)
    mlp = MlpSpec(integer(config, "intermediate_size"), flag(config, "mlp_bias"))
    return DecoderSpec(
        family=str(config.get("model_type", "llama")),
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        max_model_len=integer(config, "max_position_embeddings", 2048),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings"),
        layers=(LayerSpec(attention, mlp),) * layers,
    )


def with_attention(decoder: DecoderSpec, *, windows: tuple[int | None, ...] = (), **changes: Any) -> DecoderSpec:
    """Return a decoder whose attention differs from llama's: the same changes in all layers, a window in each."""
    windows = windows or (None,) * len(decoder.layers)
    layers = zip(decoder.layers, windows, strict=True)
    return replace(
        decoder,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=window, **changes)) for layer, window in layers
        ),
    )


def sliding_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, of `sliding_window`, `use_sliding_window`, `layer_types` and `max_window_layers`."""
    used = flag(config, "use_sliding_window")
    if not used and config.get("use_sliding_window") is not None:
        return (None,) * layers
    if config.get("sliding_window") is None:
        if used:
            raise ModelError("config.json: use_sliding_window=true, but sliding_window is missing: give its width")
        return (None,) * layers
    window = integer(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        full = integer(config, "max_window_layers", 28, least=0) if used else 0
        return tuple(None if i < full else window for i in range(layers))
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(f"config.json: layer_types must name full_attention or sliding_attention {layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_TOP = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight", "lm_head.weight": "head.weight"}


def rename(name: str) -> str | None:
    """Return the canonical name; frequencies that old checkpoints store are derived instead."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    plain = name.removeprefix("model.")
    if plain.startswith("layers."):
        layer, _, rest = plain.removeprefix("layers.").partition(".")
        part, _, kind = rest.rpartition(".")
        return f"layers.{layer}.{_PARTS[part]}.{kind}" if part in _PARTS else name
    return _TOP.get(plain, name)
