"""Layers with experts that sigmoids choose, as DeepSeek V3 has them, and others that took them over."""

__all__ = ["feed_forwards", "first_layers", "guessing_layers"]

from typing import Any

from xinfer.models.families import Config
from xinfer.models.families._fields import flag, integer, number
from xinfer.models.families._parts import experts, mlp, num_layers
from xinfer.models.spec import MlpSpec


def first_layers(config: Config) -> list[bool]:
    """Return which layers have experts: those from `first_k_dense_replace` on."""
    first = integer(config, "first_k_dense_replace", least=0)
    return [i >= first for i in range(num_layers(config))]


def feed_forwards(config: Config, sparse: list[bool], **changes: Any) -> list[MlpSpec]:
    """Return each layer's feed-forward part, of the sparse ones with experts; `changes` are those to their choice."""
    shared, size = integer(config, "n_shared_experts", least=0), integer(config, "moe_intermediate_size")
    usual: dict[str, Any] = {
        "score": "sigmoid",
        "normalized": flag(config, "norm_topk_prob"),
        "scale": number(config, "routed_scaling_factor"),
        "correction": True,
        "groups": integer(config, "n_group"),
        "chosen_groups": integer(config, "topk_group"),
        "shared": shared * size or None,
    }
    router = experts(config, "n_routed_experts", **{**usual, **changes})
    several, one = mlp(config, "moe_intermediate_size", bias=False, experts=router), mlp(config, bias=False)
    return [several if here else one for here in sparse]


def guessing_layers(config: Config) -> int:
    """Return how many layers there are besides that guess further tokens."""
    return integer(config, "num_nextn_predict_layers", integer(config, "num_mtp_layers", 1, least=0), least=0)
