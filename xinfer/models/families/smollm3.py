"""SmolLM3: llama that turns no positions in every fourth layer."""

__all__ = ["NAMES", "spec"]

from typing import Any

from xinfer.errors import ModelError
from xinfer.models.families import Config
from xinfer.models.families._fields import flag, integer
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a smollm3; layers without positions have the window, if there is one."""
    config = {**_DEFAULTS, **config}
    turned = turned_layers(config)
    windows = layer_windows(config, [not turns for turns in turned])
    if any(windows) and not flag(config, "use_sliding_window"):
        if config.get("layer_types") is not None:
            raise ModelError("config.json: layer_types names sliding_attention, but use_sliding_window is false")
        windows = [None] * len(windows)
    norm, feed_forward = rms_norm(config), mlp(config)
    layers = []
    for turns, window in zip(turned, windows, strict=True):
        unturned: dict[str, Any] = {} if turns else {"rope": None}
        layers.append(LayerSpec(attention(config, window=window, **unturned), feed_forward, norm, norm))
    return decoder(config, layers, norm)


def turned_layers(config: Config) -> list[bool]:
    """Return which layers turn positions: `no_rope_layers` has 1 for them; else all but each one that ends a period."""
    layers, period = num_layers(config), integer(config, "no_rope_layer_interval", 4)
    said = config.get("no_rope_layers")
    if said is None:
        return [(i + 1) % period != 0 for i in range(layers)]
    if not isinstance(said, list) or len(said) != layers or any(turns not in (0, 1) for turns in said):
        raise ModelError(f"config.json: no_rope_layers must have 1 (with positions) or 0 (without) {layers} times")
    return [bool(turns) for turns in said]
