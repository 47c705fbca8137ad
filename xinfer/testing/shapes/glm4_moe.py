"""Tiny models of the family glm4_moe: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON, ROUTED

SHAPES = {
    "usual": COMMON
    | ROUTED
    | {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
    "groups": COMMON | ROUTED | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "partial_rotary_factor": 1.0},
}
