"""Arcee's AFM: llama with squared ReLU and no gate."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import activation
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe an arcee."""
    config = {"max_position_embeddings": 4096, **config}
    norm = rms_norm(config, default=1e-5)
    feed_forward = mlp(config, activation=activation(config, default="relu2"), gated=False)
    return decoder(config, [LayerSpec(attention(config), feed_forward, norm, norm)] * num_layers(config), norm)
