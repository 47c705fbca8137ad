"""Tiny models of the family mixtral: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "window": COMMON | {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7},
}
