"""Tiny models of the family deepseek_v2: the first is what its checkpoints usually are."""

__all__ = ["NEEDED", "SHAPES"]

from xinfer.testing.shapes._common import COMMON, LATENT

SHAPES = {
    "usual": COMMON
    | LATENT
    | {
        "q_lora_rank": 20,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 3.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "type": "yarn",
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "plain": COMMON | LATENT | {"n_shared_experts": 2, "q_lora_rank": None, "attention_bias": True},
}

NEEDED = {"num_experts_per_tok": 3}
