"""Tiny models of the family granitemoe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "num_local_experts": 6,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "bias": COMMON | {"num_local_experts": 4, "attention_bias": True, "attention_multiplier": 0.2},
}
