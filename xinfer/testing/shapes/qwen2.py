"""Tiny models of the family qwen2: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"use_sliding_window": False},
    "window": COMMON | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}
