"""Tiny models of the family qwen3_moe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON
    | {"head_dim": 16, "num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "mixed": COMMON
    | {
        "head_dim": 12,
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [0],
    },
}
