"""Hunyuan with experts, and a part of the same size for all tokens."""

__all__ = ["NAMES", "spec"]

from typing import Any

from xinfer.models.families import Config, hunyuan_v1_dense, llama, qwen3_moe
from xinfer.models.families._fields import integer
from xinfer.models.families._parts import experts, mlp, num_layers
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a hunyuan_v1_moe; layers may have experts of other numbers."""
    shared, parts = integer(config, "intermediate_size"), []
    for layer in range(num_layers(config)):
        own = {"num_experts": _of(config, "num_experts", layer), "num_experts_per_tok": _of(config, "moe_topk", layer)}
        parts.append(mlp(config, bias=False, experts=experts({**config, **own}, shared=shared)))
    return hunyuan_v1_dense.described(config, parts)


def _of(config: Config, name: str, layer: int) -> Any:
    value = config.get(name, 1)
    return value[layer] if isinstance(value, list) and layer < len(value) else value


LAYER = {
    **hunyuan_v1_dense.LAYER,
    **qwen3_moe.EXPERTS,
    "mlp.gate.wg": "mlp.router",
    "mlp.shared_mlp.gate_proj": "mlp.shared.gate",
    "mlp.shared_mlp.up_proj": "mlp.shared.up",
    "mlp.shared_mlp.down_proj": "mlp.shared.down",
}
NAMES = Names(llama.TOP, LAYER)
