"""Qwen2-VL and 2.5-VL, their text part: qwen2, since a text's positions are the same in time, height and width."""

__all__ = ["MODEL_TYPES", "NAMES", "spec"]

from xinfer.models.families import Config, qwen2
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec

MODEL_TYPES = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
_DEFAULTS = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def spec(config: Config) -> DecoderSpec:
    """Describe the text part of a qwen2_vl or qwen2_5_vl."""
    return qwen2.spec({**_DEFAULTS, **config})
