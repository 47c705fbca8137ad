"""Tiny models of the family deepseek_v3: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON, LATENT

SHAPES = {
    "usual": COMMON
    | LATENT
    | {
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "plain": COMMON
    | LATENT
    | {
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
        "norm_topk_prob": False,
    },
}
