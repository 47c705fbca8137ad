"""Qwen2 and 2.5: llama with biases on queries, keys and values, and a window in the later layers if asked for."""

__all__ = ["NAMES", "spec"]

from xinfer.errors import ModelError
from xinfer.models.families import Config
from xinfer.models.families._fields import flag, integer
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen2; without `use_sliding_window` its `sliding_window` means nothing."""
    config = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, **config}
    norm, feed_forward = rms_norm(config), mlp(config)
    attentions = [attention(config, qkv_bias=True, output_bias=False, window=window) for window in windows(config)]
    return decoder(config, [LayerSpec(each, feed_forward, norm, norm) for each in attentions], norm)


def windows(config: Config) -> list[int | None]:
    """Return each layer's window: those from `max_window_layers` on, unless `layer_types` says which."""
    layers = num_layers(config)
    if not flag(config, "use_sliding_window"):
        return [None] * layers
    config = {"sliding_window": 4096, **config}
    if config["sliding_window"] is None:
        raise ModelError("config.json: use_sliding_window=true, but sliding_window is missing: give its width")
    full = integer(config, "max_window_layers", 28, least=0)
    return layer_windows(config, [i >= full for i in range(layers)])
