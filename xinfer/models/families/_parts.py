"""What most families' descriptions are put together from, each piece read from the fields that usually say it."""

__all__ = ["attention", "decoder", "experts", "layer_norm", "layer_windows", "mlp", "num_layers", "rms_norm"]

from collections.abc import Sequence
from typing import Any

from xinfer.errors import ModelError
from xinfer.models.families import Config
from xinfer.models.families._fields import activation, flag, integer, kinds, number
from xinfer.models.families._rope import rope
from xinfer.models.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec

_MAX_LAYERS = 1000  # of a damaged file there could be billions


def num_layers(config: Config) -> int:
    """Return how many layers there are."""
    layers = integer(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers={layers}, but at most {_MAX_LAYERS} are expected")
    return layers


def rms_norm(config: Config, name: str = "rms_norm_eps", default: float | None = 1e-6, **changes: Any) -> NormSpec:
    """Return the usual normalization."""
    return NormSpec(number(config, name, default), **changes)


def layer_norm(config: Config, name: str = "layer_norm_eps", default: float | None = 1e-5, **changes: Any) -> NormSpec:
    """Return a normalization that takes the mean off; with biases unless they are told not to be."""
    return NormSpec(number(config, name, default), **{"kind": "layer", "bias": True, **changes})


def attention(config: Config, **changes: Any) -> AttentionSpec:
    """Return grouped-query attention with rotary positions; `attention_bias` puts biases on all four projections."""
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads, head_dim = integer(config, "num_key_value_heads", heads), integer(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    bias = flag(config, "attention_bias")
    usual: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias}
    if "rope" not in changes:
        usual["rope"] = rope(config, head_dim)
    return AttentionSpec(heads, kv_heads, head_dim, **{**usual, **changes})


def mlp(config: Config, size: str = "intermediate_size", **changes: Any) -> MlpSpec:
    """Return a feed-forward part with a gate."""
    usual = {"bias": flag(config, "mlp_bias"), "activation": activation(config)}
    return MlpSpec(integer(config, size), **{**usual, **changes})


def experts(config: Config, count: str = "num_experts", **changes: Any) -> ExpertsSpec:
    """Return experts that a softmax chooses; more chosen than there are is an error."""
    spec = ExpertsSpec(integer(config, count), integer(config, "num_experts_per_tok"), **changes)
    available = spec.count // spec.groups * spec.chosen_groups
    if spec.count % spec.groups or spec.chosen_groups > spec.groups or spec.chosen > available:
        raise ModelError(
            f"config.json: num_experts_per_tok={spec.chosen} can't be chosen from {count}={spec.count} in "
            f"{spec.chosen_groups} of {spec.groups} groups"
        )
    return spec


def layer_windows(config: Config, default: Sequence[bool] | None = None) -> list[int | None]:
    """Return each layer's window: where `layer_types` names sliding_attention, or by `default`, `sliding_window`."""
    layers = num_layers(config)
    types = kinds(config, "layer_types", ("sliding_attention", "full_attention"), layers)
    sliding = default or [False] * layers if types is None else [kind == "sliding_attention" for kind in types]
    if not any(sliding) or config.get("sliding_window") is None:
        return [None] * layers
    window = integer(config, "sliding_window")
    return [window if here else None for here in sliding]


def decoder(config: Config, layers: Sequence[LayerSpec], norm: NormSpec, **changes: Any) -> DecoderSpec:
    """Return a decoder of these layers."""
    longest = integer(config, "max_position_embeddings", 2048)
    stretched = [rope.factor for rope in _ropes(layers) if rope.kind == "dynamic"]
    usual = {
        "family": str(config.get("model_type")),
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": integer(config, "hidden_size"),
        "max_model_len": int(longest * max([1.0, *stretched])),
        "tied": flag(config, "tie_word_embeddings"),
    }
    return DecoderSpec(layers=tuple(layers), norm=norm, **{**usual, **changes})


def _ropes(layers: Sequence[LayerSpec]) -> list[Any]:
    return [layer.attention.rope for layer in layers if layer.attention.rope is not None]
