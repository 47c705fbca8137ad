"""Mistral: llama with a sliding window in every layer, where the checkpoint has one."""

__all__ = ["rename", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families.llama import rename
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a mistral."""
    decoder = llama.spec(config)
    return llama.with_attention(decoder, windows=llama.sliding_windows(config, len(decoder.layers)))
