"""Qwen2 and 2.5: llama with biases on queries, keys and values, and a window in the later layers if asked for."""

__all__ = ["rename", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families.llama import rename
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen2; without `use_sliding_window` its `sliding_window` means nothing."""
    config = {"use_sliding_window": False, "num_key_value_heads": 32, "max_position_embeddings": 32_768, **config}
    decoder = llama.spec({**config, "attention_bias": False})
    return llama.with_attention(decoder, windows=llama.sliding_windows(config, len(decoder.layers)), qkv_bias=True)
