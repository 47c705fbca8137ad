"""ERNIE 4.5: llama that turns neighbouring dimensions together, with biases everywhere if asked for."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import flag, integer
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def spec(config: Config) -> DecoderSpec:
    """Describe an ernie4_5."""
    config = {**_DEFAULTS, **config}
    norm, bias = rms_norm(config), flag(config, "use_bias")
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    turned = rope(config, head_dim, interleaved=True)
    attended = attention(config, rope=turned, qkv_bias=bias, output_bias=bias)
    return decoder(config, [LayerSpec(attended, mlp(config, bias=bias), norm, norm)] * num_layers(config), norm)
