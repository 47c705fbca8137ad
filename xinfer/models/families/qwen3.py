"""Qwen3: llama whose queries and keys are normalized per head."""

__all__ = ["rename", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families.llama import rename
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen3; without `use_sliding_window` its `sliding_window` means nothing."""
    decoder = llama.spec(config)
    config = {"use_sliding_window": False, **config}
    return llama.with_attention(decoder, windows=llama.sliding_windows(config, len(decoder.layers)), qk_norm=True)
