"""Mixtral: mistral with experts, whose weights are made to sum to one."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._parts import attention, decoder, experts, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a mixtral."""
    config = {**_DEFAULTS, **config}
    norm = rms_norm(config)
    feed_forward = mlp(config, experts=experts(config, "num_local_experts"))
    windows = layer_windows(config, [True] * num_layers(config))
    return decoder(config, [LayerSpec(attention(config, window=w), feed_forward, norm, norm) for w in windows], norm)


LAYER = {
    **llama.LAYER,
    "block_sparse_moe.gate": "mlp.router",
    "block_sparse_moe.experts.*.w1": "mlp.experts.gate",
    "block_sparse_moe.experts.*.w2": "mlp.experts.down",
    "block_sparse_moe.experts.*.w3": "mlp.experts.up",
}
NAMES = Names(llama.TOP, LAYER)
