"""Tiny models of every family, as their config.json says it: between them they use every field of `DecoderSpec`."""

__all__ = ["SHAPES", "shape"]

from xinfer.testing.shapes import dense, experts, layer_norm
from xinfer.testing.shapes.common import COMMON, GPT2, Config

_OWN = {**dense.SHAPES, **layer_norm.SHAPES, **experts.SHAPES}

SHAPES: dict[str, tuple[str, ...]] = {family: tuple(own) for family, own in _OWN.items()}


def shape(family: str, name: str) -> Config:
    """Return a config.json's content, of one of the `SHAPES` of a family."""
    common = GPT2 if family in ("gpt2", "gpt_bigcode", "gptj") else COMMON
    return {"model_type": family, **common, **_OWN[family][name]}
