"""Mistral: llama with a sliding window in every layer, where the checkpoint has one, or in those it names."""

__all__ = ["MODEL_TYPES", "NAMES", "spec", "with_windows"]

from dataclasses import replace

from xinfer.models.families import Config, llama
from xinfer.models.families._parts import layer_windows
from xinfer.models.families.llama import NAMES
from xinfer.models.spec import DecoderSpec

MODEL_TYPES = ("mistral", "ministral")


def spec(config: Config) -> DecoderSpec:
    """Describe a mistral; what its config leaves out is what it was in the first one's, as the reference has it."""
    config = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072, **config}
    decoder = llama.spec(config)
    return with_windows(decoder, layer_windows(config, [True] * len(decoder.layers)))


def with_windows(decoder: DecoderSpec, windows: list[int | None]) -> DecoderSpec:
    """Return a decoder whose layers have these windows."""
    pairs = zip(decoder.layers, windows, strict=True)
    layers = tuple(replace(layer, attention=replace(layer.attention, window=window)) for layer, window in pairs)
    return replace(decoder, layers=layers)
