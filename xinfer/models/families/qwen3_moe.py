"""Qwen3 with experts, in all layers or some."""

__all__ = ["LAYER", "NAMES", "sparse_layers", "spec"]

from xinfer.errors import ModelError
from xinfer.models.families import Config, llama, qwen3
from xinfer.models.families._fields import flag, integer
from xinfer.models.families._parts import attention, decoder, experts, mlp, num_layers, rms_norm
from xinfer.models.families.qwen2 import windows
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen3_moe."""
    config = {**_DEFAULTS, **config}
    norm = rms_norm(config)
    sparse = mlp(config, "moe_intermediate_size", experts=experts(config, normalized=flag(config, "norm_topk_prob")))
    layers = [
        LayerSpec(attention(config, qk_norm=norm, window=window), sparse if is_sparse else mlp(config), norm, norm)
        for window, is_sparse in zip(windows(config), sparse_layers(config), strict=True)
    ]
    return decoder(config, layers, norm)


def sparse_layers(config: Config) -> list[bool]:
    """Return which layers have experts: every `decoder_sparse_step`-th, but none of `mlp_only_layers`."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers={dense!r}, but a list of layers' numbers is expected")
    step = integer(config, "decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers(config))]


EXPERTS = {
    "mlp.gate": "mlp.router",
    "mlp.experts.*.gate_proj": "mlp.experts.gate",
    "mlp.experts.*.up_proj": "mlp.experts.up",
    "mlp.experts.*.down_proj": "mlp.experts.down",
}
LAYER = {**qwen3.LAYER, **EXPERTS}
NAMES = Names(llama.TOP, LAYER)
