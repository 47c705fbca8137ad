"""Command R7B and A: both parts at once, positions only in layers with a window, logits scaled."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import integer, number
from xinfer.models.families._parts import attention, decoder, layer_norm, layer_windows, mlp, num_layers
from xinfer.models.families._rope import rope
from xinfer.models.spec import DecoderSpec, LayerSpec

NAMES = llama.NAMES
_DEFAULTS = {"max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    """Describe a cohere2; of four layers the last sees all, unless `sliding_window_pattern` or `layer_types` differ."""
    config = {**_DEFAULTS, **config}
    norm = layer_norm(config, bias=False)
    pattern = integer(config, "sliding_window_pattern", 4)
    turned = rope(config, integer(config, "hidden_size") // integer(config, "num_attention_heads"), interleaved=True)
    attentions = [
        attention(config, window=window, rope=None if window is None else turned)
        for window in layer_windows(config, [(i + 1) % pattern > 0 for i in range(num_layers(config))])
    ]
    layers = [LayerSpec(each, mlp(config), norm, None, parallel=True) for each in attentions]
    return decoder(config, layers, norm, logit_scale=number(config, "logit_scale", 0.0625))
