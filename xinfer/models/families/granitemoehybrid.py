"""Granite 4 without recurrent layers: granite with fused gates, and layers that may turn no positions."""

__all__ = ["NAMES", "spec"]

from typing import Any

from xinfer.errors import ModelError
from xinfer.models.families import Config, llama
from xinfer.models.families._fields import integer, kinds, refuse
from xinfer.models.families._parts import mlp, num_layers
from xinfer.models.families.granite import scaled
from xinfer.models.names import Names, Stored
from xinfer.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a granitemoehybrid of attention alone; only its recurrent ones have experts."""
    types = kinds(
        config, "layer_types", ("attention", "full_attention", "mamba", "linear_attention"), num_layers(config)
    )
    if types is None or not {"attention", "full_attention"}.issuperset(types):
        raise ModelError(
            "config.json: layer_types must be attention everywhere, since recurrent layers are not supported"
        )
    if integer(config, "num_local_experts", 8, least=0):
        raise ModelError(
            f"config.json: num_local_experts={config.get('num_local_experts', 8)} is not supported, only 0"
        )
    refuse(config, "position_embedding_type", "rope", "nope")
    unturned: dict[str, Any] = {} if config.get("position_embedding_type") == "rope" else {"rope": None}
    config = {"shared_intermediate_size": 1024, **config}
    return scaled(config, mlp(config, "shared_intermediate_size", bias=False), **unturned)


LAYER = {
    **llama.LAYER,
    "shared_mlp.input_linear": Stored(("mlp.gate", "mlp.up")),
    "shared_mlp.output_linear": "mlp.down",
}
NAMES = Names(llama.TOP, LAYER)
