"""DeepSeek V2: latent attention, experts chosen by a softmax, also from the best groups only."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import integer, number, refuse
from xinfer.models.families._latent import latent_attention
from xinfer.models.families._parts import decoder, experts, mlp, num_layers, rms_norm
from xinfer.models.families.deepseek_v3 import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {"q_lora_rank": 1536, "n_routed_experts": 64, "moe_intermediate_size": 1407}


def spec(config: Config) -> DecoderSpec:
    """Describe a deepseek_v2; its experts' weights are scaled, not made to sum to one."""
    config = {**_DEFAULTS, **config}
    for name, usual in (
        ("norm_topk_prob", False),
        ("moe_layer_freq", 1),
        ("scoring_func", "softmax"),
        ("mlp_bias", False),
    ):
        refuse(config, name, usual)
    refuse(config, "topk_method", "greedy", "group_limited_greedy")
    grouped = config.get("topk_method") == "group_limited_greedy"
    shared, size = integer(config, "n_shared_experts", 2, least=0), integer(config, "moe_intermediate_size")
    router = experts(
        config,
        "n_routed_experts",
        normalized=False,
        scale=number(config, "routed_scaling_factor", 1.0),
        groups=integer(config, "n_group") if grouped else 1,
        chosen_groups=integer(config, "topk_group") if grouped else 1,
        group_score="best",
        shared=shared * size or None,
    )
    norm = rms_norm(config)
    sparse, dense = mlp(config, "moe_intermediate_size", experts=router), mlp(config)
    attention = latent_attention(config, interleaved=True)
    first = integer(config, "first_k_dense_replace", 0, least=0)
    parts = [dense if i < first else sparse for i in range(num_layers(config))]
    return decoder(config, [LayerSpec(attention, part, norm, norm) for part in parts], norm)
