"""Gemma: llama with wide heads, factors of norms that are 1 + w, and scaled embeddings."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import integer, refuse
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}


def spec(config: Config) -> DecoderSpec:
    """Describe a gemma; what its first configs call gelu is the approximation by tanh, as the reference has it."""
    config = {**_DEFAULTS, **config}
    if config["hidden_act"] == "gelu":
        config["hidden_act"] = "gelu_pytorch_tanh"
    refuse(config, "hidden_activation", config["hidden_act"])
    refuse(config, "use_bidirectional_attention", False)
    norm = rms_norm(config, offset=1.0)
    layer = LayerSpec(attention(config), mlp(config, bias=False), norm, norm)
    return decoder(config, [layer] * num_layers(config), norm, embed_scale=integer(config, "hidden_size") ** 0.5)
