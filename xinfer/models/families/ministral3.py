"""Ministral 3: mistral with positions by yarn, whose queries grow with the length of the context."""

__all__ = ["NAMES", "ROPE", "spec"]

from typing import Any

from xinfer.models.families import Config, mistral
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec

ROPE: dict[str, Any] = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "sliding_window": None}


def spec(config: Config) -> DecoderSpec:
    """Describe a ministral3."""
    config = {**_DEFAULTS, **config}
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        own = {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
        config["rope_parameters"] = {**ROPE, **own}
    return mistral.spec(config)
