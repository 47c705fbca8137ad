"""Tiny models of the family gpt_bigcode: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import GPT2

SHAPES = {
    "usual": GPT2 | {"multi_query": True},
    "heads": GPT2 | {"multi_query": False, "n_inner": 60, "scale_attn_weights": False, "activation_function": "relu"},
}
