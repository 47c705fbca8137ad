"""StarCoder2: llama with layer norms, no gate, biases everywhere, and a sliding window where the checkpoint has one."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import activation, flag, refuse
from xinfer.models.families._parts import attention, decoder, layer_norm, layer_windows, mlp, num_layers
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a starcoder2."""
    defaults = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = {**defaults, **config, "layer_types": None}
    refuse(config, "mlp_type", "default")
    refuse(config, "norm_type", "layer_norm")
    bias = flag(config, "use_bias", default=True)
    feed_forward = mlp(config, bias=bias, activation=activation(config, default="gelu_pytorch_tanh"), gated=False)
    norm = layer_norm(config, "norm_epsilon")
    layers = [
        LayerSpec(attention(config, qkv_bias=bias, output_bias=bias, window=window), feed_forward, norm, norm)
        for window in layer_windows(config, [True] * num_layers(config))
    ]
    return decoder(config, layers, norm)


NAMES = Names(llama.TOP, {**llama.LAYER, "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"})
