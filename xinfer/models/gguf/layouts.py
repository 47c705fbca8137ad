"""What GGUF's tensors are, and what puts those in order that converters laid out in another way.

Names and layouts are those of llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion`).
"""

__all__ = ["LAYER", "LESS_ONE", "ONE_ROW", "PAIRS", "PER_HEAD", "TOP", "Undo"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xinfer.models.names import Stored, Target

Config = dict[str, Any]
Undo = Callable[[Tensor, Config], Tensor]

TOP: dict[str, Target] = {
    "token_embd": "embed",
    "position_embd": "positions",
    "output_norm": "norm",
    "output": "head",
    "rope_freqs.weight": None,  # these are read with the keys
    "rope_factors_long.weight": None,
    "rope_factors_short.weight": None,
}
# What a tensor of a layer is, in all architectures but those that say otherwise.
LAYER: dict[str, Target] = {
    "attn_norm": "attn_norm",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
    "attn_qkv": Stored(("attn.q", "attn.k", "attn.v")),
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_sinks.weight": "attn.sinks",
    "attn_q_a": "attn.q_a",
    "attn_q_a_norm": "attn.q_a_norm",
    "attn_q_b": "attn.q_b",
    "attn_kv_a_mqa": "attn.kv_a",
    "attn_kv_a_norm": "attn.kv_a_norm",
    "attn_kv_b": Stored(("attn.k_b", "attn.v_b"), interleaved="heads"),
    "attn_k_b": "attn.k_b",
    "attn_v_b": "attn.v_b",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "ffn_gate_inp": "mlp.router",
    "exp_probs_b.bias": "mlp.router.correction",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_down_exps": "mlp.experts.down",
    "ffn_gate_up_exps": Stored(("mlp.experts.gate", "mlp.experts.up")),
    "ffn_gate.*": "mlp.experts.gate",  # of files from before April 2024
    "ffn_up.*": "mlp.experts.up",
    "ffn_down.*": "mlp.experts.down",
    "ffn_gate_shexp": "mlp.shared.gate",
    "ffn_up_shexp": "mlp.shared.up",
    "ffn_down_shexp": "mlp.shared.down",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
}


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    """Undo the interleaving of the two halves of each head's rows."""
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def _pairs_in_fused(tensor: Tensor, config: Config) -> Tensor:
    """The same where queries, keys and values are one tensor."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    turned = tensor.shape[0] // (heads + 2 * kv_heads) * (heads + kv_heads)
    return torch.cat([_half_split(tensor[:turned], heads + kv_heads), tensor[turned:]])


def _less_one(tensor: Tensor, config: Config) -> Tensor:
    """Return w of a stored 1 + w."""
    return tensor.float() - 1


PAIRS: dict[str, Undo] = {
    "attn_q": lambda tensor, config: _half_split(tensor, config["num_attention_heads"]),
    "attn_k": lambda tensor, config: _half_split(tensor, config["num_key_value_heads"]),
    "attn_qkv": _pairs_in_fused,
}
_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
LESS_ONE: dict[str, Undo] = {f"{name}.weight": _less_one for name in _NORMS}
ONE_ROW: dict[str, Undo] = {"ffn_gate_inp_shexp": lambda tensor, config: tensor.reshape(1, -1)}
PER_HEAD: dict[str, Undo] = {
    "attn_k_b": lambda tensor, config: tensor.transpose(-1, -2).flatten(0, -2) if tensor.ndim == 3 else tensor,
    "attn_v_b": lambda tensor, config: tensor.flatten(0, -2),
}
