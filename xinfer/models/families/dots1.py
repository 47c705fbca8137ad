"""dots.llm1: qwen3 with experts as DeepSeek V3's, and a window in the later layers if asked for."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import integer
from xinfer.models.families._parts import attention, decoder, layer_windows, num_layers, rms_norm
from xinfer.models.families._sparse import feed_forwards, first_layers
from xinfer.models.families.glm4_moe import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a dots1."""
    config = {**_DEFAULTS, **config}
    norm, full = rms_norm(config), integer(config, "max_window_layers", 62, least=0)
    windows = layer_windows(config, [i >= full for i in range(num_layers(config))])
    layers = [
        LayerSpec(attention(config, qk_norm=norm, window=window), part, norm, norm)
        for window, part in zip(windows, feed_forwards(config, first_layers(config)), strict=True)
    ]
    return decoder(config, layers, norm)
