"""Latent attention, as DeepSeek's models and those after them have it, and their tensors' names."""

__all__ = ["LAYER", "latent_attention"]

from typing import Any

from xinfer.models.families import Config, llama, qwen3_moe
from xinfer.models.families._fields import flag, integer, number, optional
from xinfer.models.families._parts import rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.names import Stored
from xinfer.models.rope import mscale
from xinfer.models.spec import AttentionSpec, LatentSpec


def latent_attention(config: Config, interleaved: bool) -> AttentionSpec:
    """Return latent attention; yarn scales its scores too."""
    heads, rank = integer(config, "num_attention_heads"), integer(config, "kv_lora_rank", 512)
    q_rank = None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank")
    nope, turned = integer(config, "qk_nope_head_dim", 128), integer(config, "qk_rope_head_dim", 64)
    norm = rms_norm({"rms_norm_eps": 1e-6})  # whatever the others have
    latent = LatentSpec(rank, q_rank, nope, turned, integer(config, "v_head_dim", 128), norm)
    given: Any = config.get("rope_scaling") or config.get("rope_parameters") or {}
    turning = rope(config, turned, interleaved=interleaved)
    scaling = (nope + turned) ** -0.5
    if turning.kind != "default" and (everywhere := optional(given, "mscale_all_dim")):
        sharper = mscale(turning.factor, everywhere)
        scaling = number({"mscale_all_dim": scaling * sharper * sharper}, "mscale_all_dim")
    bias = flag(config, "attention_bias")
    return AttentionSpec(heads, 1, rank + turned, turning, bias, bias, scaling=scaling, latent=latent)


LAYER = {
    **llama.LAYER,
    **qwen3_moe.EXPERTS,
    "self_attn.q_a_proj": "attn.q_a",
    "self_attn.q_a_layernorm": "attn.q_a_norm",
    "self_attn.q_b_proj": "attn.q_b",
    "self_attn.kv_a_proj_with_mqa": "attn.kv_a",
    "self_attn.kv_a_layernorm": "attn.kv_a_norm",
    "self_attn.kv_b_proj": Stored(("attn.k_b", "attn.v_b"), interleaved="heads"),
    "mlp.gate.e_score_correction_bias": "mlp.router.correction",
    "mlp.shared_experts.gate_proj": "mlp.shared.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
}
