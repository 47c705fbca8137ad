"""StableLM: llama with layer norms, rotary positions in a quarter of a head, norms of each head if asked for."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import flag
from xinfer.models.families._parts import attention, decoder, layer_norm, mlp, num_layers
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a stablelm."""
    defaults = {"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}
    config = {**defaults, **config}
    norm, parallel = layer_norm(config), flag(config, "use_parallel_residual")
    attended = attention(
        config,
        qkv_bias=flag(config, "use_qkv_bias"),
        output_bias=False,
        qk_norm=layer_norm(config, bias=False) if flag(config, "qk_layernorm") else None,
        qk_norm_over="heads",
    )
    layer = LayerSpec(attended, mlp(config, bias=False), norm, None if parallel else norm, parallel=parallel)
    return decoder(config, [layer] * num_layers(config), norm)


LAYER = {
    **llama.LAYER,
    "self_attn.q_layernorm.norms.*": "attn.q_norm",
    "self_attn.k_layernorm.norms.*": "attn.k_norm",
}
NAMES = Names(llama.TOP, LAYER)
