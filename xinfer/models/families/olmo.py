"""OLMo: llama with norms that have nothing learned, and queries, keys and values that may be cut."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import optional
from xinfer.models.families._parts import attention, decoder, mlp, num_layers
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec, NormSpec


def spec(config: Config) -> DecoderSpec:
    """Describe an olmo."""
    norm = NormSpec(1e-5, "layer", weight=False)
    layer = LayerSpec(attention(config, clip=optional(config, "clip_qkv")), mlp(config, bias=False), norm, norm)
    return decoder(config, [layer] * num_layers(config), norm)
