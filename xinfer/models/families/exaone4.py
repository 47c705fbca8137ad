"""EXAONE 4: norms behind each part and on each head; in the large one only layers with a window turn positions."""

__all__ = ["NAMES", "spec"]

from typing import Any

from xinfer.models.families import Config
from xinfer.models.families._fields import integer
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.families.olmo2 import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe an exaone4; without a window every layer turns positions."""
    config = {"num_key_value_heads": 32, "sliding_window": 4096, **config}
    layers, default = num_layers(config), None
    if config["sliding_window"] is not None and config.get("layer_types") is None:
        pattern = integer(config, "sliding_window_pattern", 4)
        default = [(i + 1) % pattern > 0 for i in range(layers)]
    norm, feed_forward = rms_norm(config, default=1e-5), mlp(config, bias=False)
    attentions = []
    for window in layer_windows(config, default):
        unturned: dict[str, Any] = {} if config["sliding_window"] is None or window is not None else {"rope": None}
        kind = attention(config, qkv_bias=False, output_bias=False, qk_norm=norm, window=window, **unturned)
        attentions.append(kind)
    return decoder(config, [LayerSpec(each, feed_forward, None, None, norm, norm) for each in attentions], norm)
