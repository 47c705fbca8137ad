"""Reading config.json: a field that is missing or odd is an error that names it."""

__all__ = ["flag", "integer", "number", "refuse", "rope"]

import math
from typing import Any

from xinfer.errors import ModelError, nearest
from xinfer.models.families import Config
from xinfer.models.spec import RopeSpec


def integer(config: Config, name: str, default: int | None = None, least: int = 1) -> int:
    """Return a field that must be a whole number from `least` on; a missing or null one takes the default, if any."""
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"config.json: {name}={value!r}, but a whole number of at least {least} is expected")
    return value


def number(config: Config, name: str, default: float | None = None) -> float:
    """Return a field that must be a positive number; a missing or null one takes the default, if there is one."""
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name}={value!r}, but a positive number is expected")
    return float(value)


def flag(config: Config, name: str) -> bool:
    """Return a field that must be true or false; a missing or null one is false."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {name}={value!r}, but true or false is expected")
    return bool(value)


def refuse(config: Config, name: str, *accepted: Any) -> None:
    """Refuse a field whose value would need something that the family does not do."""
    if config.get(name) not in (None, *accepted):
        raise ModelError(f"config.json: {name}={config[name]!r} is not supported (supported: {list(accepted)})")


def rope(config: Config, dim: int) -> RopeSpec:
    """Return the rotary embedding of a config, in any of its spellings.

    That is `rope_theta` beside `rope_scaling` (whose kind is under `rope_type` or `type`), or all in `rope_parameters`.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"config.json: rope scaling {given!r} is not supported: one kind for all layers is expected")
    parameters = dict(given)
    theta = number({"rope_theta": parameters.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10_000.0)
    kinds = {k: parameters[k] for k in ("rope_type", "type") if parameters.get(k) is not None}
    kind = next(iter(kinds.values()), "default")
    if any(other != kind for other in kinds.values()):
        raise ModelError(f"config.json: the rope scaling names two kinds, {kinds}: remove the wrong one")
    refuse({**config, **parameters}, "partial_rotary_factor", 1, 1.0)
    if dim % 2:
        raise ModelError(f"config.json: head_dim={dim}, but rotary embeddings turn pairs: an even number is expected")
    if kind == "default":
        return RopeSpec(dim, theta)
    if kind == "linear":
        return RopeSpec(dim, theta, kind, _needed(parameters, kind, "factor"))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, original = (_needed(parameters, kind, name) for name in names)
        if high <= low:
            raise ModelError(f"config.json: rope scaling needs high_freq_factor={high} above low_freq_factor={low}")
        return RopeSpec(dim, theta, kind, factor, low, high, int(original))
    if kind == "factors" and isinstance(factors := parameters.get("factors"), list):  # of GGUF alone
        if len(factors) != dim // 2:
            raise ModelError(f"rope scaling gives {len(factors)} factors for heads of {dim // 2} pairs")
        return RopeSpec(dim, theta, kind, factors=tuple(number({"factors": value}, "factors") for value in factors))
    supported = ("default", "linear", "llama3")
    raise ModelError(
        f"config.json: rope scaling of kind {kind!r} is not supported{nearest(str(kind), supported)} "
        f"(supported: {', '.join(supported)})"
    )


def _needed(parameters: dict[str, Any], kind: str, name: str) -> float:
    if parameters.get(name) is None:
        raise ModelError(f"config.json: rope scaling of kind {kind!r} lacks {name!r}")
    return number(parameters, name)
