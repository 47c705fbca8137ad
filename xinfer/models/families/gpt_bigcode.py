"""StarCoder and SantaCoder: gpt2 whose heads share keys and values, with matrices the usual way round."""

__all__ = ["NAMES", "spec"]

from dataclasses import replace

from xinfer.models.families import Config, gpt2
from xinfer.models.families._fields import flag
from xinfer.models.names import Names, Stored
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a gpt_bigcode."""
    decoder = gpt2.spec({"activation_function": "gelu_pytorch_tanh", **config})
    if not flag(config, "multi_query", default=True):
        return decoder
    layers = tuple(replace(layer, attention=replace(layer.attention, kv_heads=1)) for layer in decoder.layers)
    return replace(decoder, layers=layers)


LAYER = {
    **gpt2.LAYER,
    "attn.c_attn": Stored(("attn.q", "attn.k", "attn.v"), interleaved="heads"),
    "attn.c_proj": "attn.o",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
NAMES = Names(gpt2.TOP, LAYER, "h")
