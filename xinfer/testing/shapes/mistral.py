"""Tiny models of the family mistral: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "window": COMMON | {"sliding_window": 16},
    "whole": COMMON | {"sliding_window": None, "head_dim": 16},
}
