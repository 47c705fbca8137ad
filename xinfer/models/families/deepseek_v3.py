"""DeepSeek V3 and R1: latent attention, experts chosen from the best groups by sigmoids, the first layers without."""

__all__ = ["LAYER", "NAMES", "latent_attention", "spec"]

from typing import Any

from xinfer.models.families import Config, llama, qwen3_moe
from xinfer.models.families._fields import flag, integer, number, optional
from xinfer.models.families._parts import decoder, experts, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.names import Names, Stored
from xinfer.models.rope import mscale
from xinfer.models.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a deepseek_v3; the layers that guess further tokens are not used."""
    config = {**_DEFAULTS, **config}
    shared, size = integer(config, "n_shared_experts", 1, least=0), integer(config, "moe_intermediate_size")
    router = experts(
        config,
        "n_routed_experts",
        score="sigmoid",
        normalized=flag(config, "norm_topk_prob", default=True),
        scale=number(config, "routed_scaling_factor", 2.5),
        correction=True,
        groups=integer(config, "n_group", 8),
        chosen_groups=integer(config, "topk_group", 4),
        shared=shared * size or None,
    )
    norm = rms_norm(config)
    sparse, dense = mlp(config, "moe_intermediate_size", experts=router), mlp(config)
    attention = latent_attention(config, interleaved=flag(config, "rope_interleave", default=True))
    first = integer(config, "first_k_dense_replace", 3, least=0)
    parts = [dense if i < first else sparse for i in range(num_layers(config))]
    return decoder(config, [LayerSpec(attention, part, norm, norm) for part in parts], norm)


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
        scaling *= mscale(turning.factor, everywhere) ** 2
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
