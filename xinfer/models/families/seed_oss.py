"""Seed-OSS: llama with wide heads and biases on queries, keys and values."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import flag
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a seed_oss."""
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288, "attention_bias": True}
    config = {**defaults, **config}
    norm = rms_norm(config)
    attended = attention(config, output_bias=flag(config, "attention_out_bias"))
    return decoder(config, [LayerSpec(attended, mlp(config), norm, norm)] * num_layers(config), norm)
