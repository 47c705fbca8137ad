"""Mistral: llama with a sliding window in every layer, where the checkpoint has one."""

__all__ = ["rename", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families.llama import rename
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a mistral; what its config leaves out is what it was in the first one's, as the reference has it."""
    config = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072, **config}
    decoder = llama.spec(config)
    return llama.with_attention(decoder, windows=llama.sliding_windows(config, len(decoder.layers)))
