"""DeepSeek V3 and R1: latent attention, experts chosen from the best groups by sigmoids, the first layers without."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import flag, refuse
from xinfer.models.families._latent import LAYER, latent_attention
from xinfer.models.families._parts import decoder, rms_norm
from xinfer.models.families._sparse import feed_forwards, first_layers, guessing_layers
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec

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


NAMES = Names(llama.TOP, LAYER)
