"""Nemotron 4 and Minitron: llama with layer norms by 1 + w, squared ReLU without a gate, positions in half a head."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import activation
from xinfer.models.families._parts import attention, decoder, layer_norm, mlp, num_layers
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a nemotron."""
    config = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.5, **config}
    norm = layer_norm(config, "norm_eps", offset=1.0)
    feed_forward = mlp(config, activation=activation(config, default="relu2"), gated=False)
    return decoder(config, [LayerSpec(attention(config), feed_forward, norm, norm)] * num_layers(config), norm)
