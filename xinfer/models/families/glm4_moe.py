"""GLM-4.5 and 4.6: llama with experts as DeepSeek V3's, positions in half of a head, heads normalized if asked for."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, _latent, llama, qwen3
from xinfer.models.families._fields import flag
from xinfer.models.families._parts import attention, decoder, rms_norm
from xinfer.models.families._sparse import feed_forwards, first_layers, guessing_layers
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a glm4_moe."""
    config = {**_DEFAULTS, **config}
    norm = rms_norm(config)
    attended = attention(config, output_bias=False, qk_norm=norm if flag(config, "use_qk_norm") else None)
    layers = [LayerSpec(attended, part, norm, norm) for part in feed_forwards(config, first_layers(config))]
    return decoder(config, layers, norm, guessing_layers=guessing_layers(config))


NAMES = Names(llama.TOP, {**_latent.LAYER, **qwen3.LAYER})
