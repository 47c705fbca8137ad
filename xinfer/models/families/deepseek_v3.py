"""DeepSeek V3 and R1: latent attention, experts chosen from the best groups by sigmoids, the first layers without."""

__all__ = ["LAYER", "NAMES", "latent_attention", "spec"]

from typing import Any

from xinfer.models.families import Config, llama, qwen3_moe
from xinfer.models.families._fields import flag, integer, number, optional, refuse
from xinfer.models.families._parts import decoder, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.families._sparse import feed_forwards, first_layers, guessing_layers
from xinfer.models.names import Names, Stored
from xinfer.models.rope import mscale
from xinfer.models.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a deepseek_v3."""
    config = {**_DEFAULTS, **config}
    for name, usual in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        refuse(config, name, usual)
    norm = rms_norm(config)
    attention = latent_attention(config, interleaved=flag(config, "rope_interleave", default=True))
    layers = [LayerSpec(attention, part, norm, norm) for part in feed_forwards(config, first_layers(config))]
    return decoder(config, layers, norm, guessing_layers=guessing_layers(config))


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
NAMES = Names(llama.TOP, LAYER)
