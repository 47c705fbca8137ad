"""Tiny models of the family gptj: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import GPT2

SHAPES = {
    "usual": GPT2 | {"rotary_dim": 8},
    "tied": GPT2 | {"rotary_dim": 12, "n_inner": 60, "tie_word_embeddings": True},
}
