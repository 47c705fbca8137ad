"""Tiny models of the family falcon: the first is what its checkpoints usually are."""

__all__ = ["SHAPES"]

from xinfer.testing.shapes._common import COMMON

SHAPES = {
    "one_key_head": COMMON | {"multi_query": True, "tie_word_embeddings": True, "rope_theta": 500.0},
    "groups": COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 60},
    "one_norm": COMMON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    "serial": COMMON | {"multi_query": False, "parallel_attn": False, "bias": True, "activation": "relu"},
}
