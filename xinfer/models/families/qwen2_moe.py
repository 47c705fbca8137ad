"""Qwen1.5 and Qwen2 with experts, one of them for all tokens and weighed by a gate of its own."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama, qwen3_moe
from xinfer.models.families._fields import flag, integer
from xinfer.models.families._parts import attention, decoder, experts, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen2_moe."""
    config = {**_DEFAULTS, **config}
    norm = rms_norm(config)
    router = experts(
        config,
        normalized=flag(config, "norm_topk_prob"),
        shared=integer(config, "shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    sparse, dense = mlp(config, "moe_intermediate_size", bias=False, experts=router), mlp(config, bias=False)
    bias = flag(config, "qkv_bias", default=True)
    attentions = [attention(config, qkv_bias=bias, output_bias=False, window=window) for window in _windows(config)]
    parts = [sparse if is_sparse else dense for is_sparse in qwen3_moe.sparse_layers(config)]
    layers = [LayerSpec(each, part, norm, norm) for each, part in zip(attentions, parts, strict=True)]
    return decoder(config, layers, norm)


def _windows(config: Config) -> list[int | None]:
    """Return each layer's window: every other one's below `max_window_layers`, unless `layer_types` says which."""
    layers, last = num_layers(config), integer(config, "max_window_layers", 28, least=0)
    if not flag(config, "use_sliding_window"):
        return [None] * layers
    return layer_windows(config, [i % 2 == 0 and i < last for i in range(layers)])


LAYER = {
    **llama.LAYER,
    **qwen3_moe.EXPERTS,
    "mlp.shared_expert.gate_proj": "mlp.shared.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
}
NAMES = Names(llama.TOP, LAYER)
