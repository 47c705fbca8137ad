"""Qwen3-VL, its text part: qwen3, since a text's positions are the same in time, height and width."""

__all__ = ["MODEL_TYPES", "NAMES", "spec"]

from xinfer.models.families import Config, qwen3
from xinfer.models.families.qwen3 import NAMES
from xinfer.models.spec import DecoderSpec

MODEL_TYPES = ("qwen3_vl_text",)


def spec(config: Config) -> DecoderSpec:
    """Describe the text part of a qwen3_vl."""
    return qwen3.spec(
        {"max_position_embeddings": 128_000, "rope_theta": 500_000.0, **config, "use_sliding_window": False}
    )
