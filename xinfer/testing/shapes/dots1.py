"""Tiny models of the family dots1: the first is what its checkpoints usually are."""

__all__ = ["NEEDED", "SHAPES"]

from xinfer.testing.shapes._common import COMMON, ROUTED

SHAPES = {
    "usual": COMMON | ROUTED | {"head_dim": 16, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "window": COMMON
    | ROUTED
    | {
        "first_k_dense_replace": 0,
        "head_dim": 12,
        "sliding_window": 9,
        "max_window_layers": 1,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
    },
}

NEEDED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3}
