"""Phi 1, 1.5 and 2: both parts at once from one norm, rotary positions in half of a head, biases everywhere."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import activation, flag
from xinfer.models.families._parts import attention, decoder, layer_norm, mlp, num_layers
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a phi."""
    config = {"partial_rotary_factor": 0.5, **config}
    norm = layer_norm(config)
    qk_norm = norm if flag(config, "qk_layernorm") else None
    feed_forward = mlp(config, bias=True, activation=activation(config, default="gelu_new"), gated=False)
    attended = attention(config, qkv_bias=True, output_bias=True, qk_norm=qk_norm)
    layers = [LayerSpec(attended, feed_forward, norm, None, parallel=True)] * num_layers(config)
    return decoder(config, layers, norm, head_bias=True)


LAYER = {
    **llama.LAYER,
    "self_attn.dense": "attn.o",
    "self_attn.q_layernorm": "attn.q_norm",
    "self_attn.k_layernorm": "attn.k_norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}
NAMES = Names({**llama.TOP, "final_layernorm": "norm"}, LAYER)
