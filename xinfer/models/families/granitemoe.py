"""Granite 3 with experts, whose weights are made to sum to one; one of them for all tokens where it has a size."""

__all__ = ["MODEL_TYPES", "NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import integer
from xinfer.models.families._parts import experts, mlp
from xinfer.models.families.granite import scaled
from xinfer.models.names import Names, Stored
from xinfer.models.spec import DecoderSpec

MODEL_TYPES = ("granitemoe", "granitemoeshared")


def spec(config: Config) -> DecoderSpec:
    """Describe a granitemoe or a granitemoeshared."""
    config = {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    shares = config.get("model_type") == "granitemoeshared"
    shared = integer(config, "shared_intermediate_size", 0, least=0) if shares else 0
    return scaled(config, mlp(config, bias=False, experts=experts(config, "num_local_experts", shared=shared or None)))


LAYER = {
    **llama.LAYER,
    "block_sparse_moe.router.layer": "mlp.router",
    "block_sparse_moe.input_linear": Stored(("mlp.experts.gate", "mlp.experts.up")),
    "block_sparse_moe.output_linear": "mlp.experts.down",
    "shared_mlp.input_linear": Stored(("mlp.shared.gate", "mlp.shared.up")),
    "shared_mlp.output_linear": "mlp.shared.down",
}
NAMES = Names(llama.TOP, LAYER)
