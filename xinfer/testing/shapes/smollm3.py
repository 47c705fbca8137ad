"""Tiny models of the family smollm3: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "usual": COMMON | {"num_hidden_layers": 4, "rope_theta": 50000.0, "tie_word_embeddings": True},
    "window": COMMON
    | {
        "no_rope_layers": [1, 0, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000.0,
            "type": "yarn",
        },
    },
}
