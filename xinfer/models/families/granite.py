"""Granite 3: llama with factors on embeddings, scores, what each part returns, and logits."""

__all__ = ["NAMES", "scaled", "spec"]

from typing import Any

from xinfer.models.families import Config
from xinfer.models.families._fields import number
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec, MlpSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a granite."""
    return scaled(config, mlp(config))


def scaled(config: Config, feed_forward: MlpSpec, **changes: Any) -> DecoderSpec:
    """Return a decoder with the family's factors; `changes` are those to its attention."""
    norm = rms_norm(config)
    attended = attention(config, scaling=number(config, "attention_multiplier", 1.0), **changes)
    residual_scale = number(config, "residual_multiplier", 1.0)
    layer = LayerSpec(attended, feed_forward, norm, norm, residual_scale=residual_scale)
    return decoder(
        config,
        [layer] * num_layers(config),
        norm,
        embed_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )
