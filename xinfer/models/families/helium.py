"""Helium: llama that turns neighbouring dimensions together, with biases on queries, keys and values if asked for."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import integer
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 20,
    "max_position_embeddings": 4096,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-8,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a helium; `attention_bias` puts no biases on what attention returns."""
    config = {**_DEFAULTS, **config}
    norm = rms_norm(config)
    turned = rope(config, integer(config, "head_dim"), interleaved=True)
    layer = LayerSpec(attention(config, rope=turned, output_bias=False), mlp(config), norm, norm)
    return decoder(config, [layer] * num_layers(config), norm)
