"""Tiny models of the family gemma2: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"head_dim": 16, "sliding_window": 9, "tie_word_embeddings": True, "query_pre_attn_scalar": 20},
    "uncapped": COMMON
    | {"head_dim": 16, "sliding_window": 30, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
}
