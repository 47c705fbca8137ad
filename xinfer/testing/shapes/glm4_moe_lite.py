"""Tiny models of the family glm4_moe_lite: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON, LATENT

SHAPES = {
    "usual": COMMON | LATENT | {"q_lora_rank": 20, "rope_theta": 1000000.0},
    "types": COMMON
    | LATENT
    | {
        "q_lora_rank": None,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_group": 4,
        "topk_group": 2,
        "rope_interleave": False,
    },
}
