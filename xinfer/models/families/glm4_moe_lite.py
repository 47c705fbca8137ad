"""GLM-4.7 Flash: DeepSeek V3 in other sizes, with experts in all layers but the first."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import flag, kinds
from xinfer.models.families._latent import latent_attention
from xinfer.models.families._parts import decoder, num_layers, rms_norm
from xinfer.models.families._sparse import feed_forwards, guessing_layers
from xinfer.models.families.deepseek_v3 import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a glm4_moe_lite."""
    config = {**_DEFAULTS, **config}
    layers = num_layers(config)
    types = kinds(config, "mlp_layer_types", ("dense", "sparse"), layers)
    sparse = [i > 0 for i in range(layers)] if types is None else [kind == "sparse" for kind in types]
    norm = rms_norm(config)
    attention = latent_attention(config, interleaved=flag(config, "rope_interleave", default=True))
    parts = feed_forwards(config, sparse)
    guessing = guessing_layers(config)
    return decoder(config, [LayerSpec(attention, part, norm, norm) for part in parts], norm, guessing_layers=guessing)
