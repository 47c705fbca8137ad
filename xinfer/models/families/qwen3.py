"""Qwen3: llama whose queries and keys are normalized per head."""

__all__ = ["rename", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families.llama import rename
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen3; without `use_sliding_window` its `sliding_window` means nothing."""
    defaults = {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32_768}
    config = {"use_sliding_window": False, **defaults, **config}
    decoder = llama.spec(config)
    return llama.with_attention(decoder, windows=llama.sliding_windows(config, len(decoder.layers)), qk_norm=True)
