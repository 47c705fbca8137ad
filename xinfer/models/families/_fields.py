"""Reading config.json: a field that is missing or odd is an error that names it."""

__all__ = ["activation", "flag", "integer", "kinds", "number", "optional", "refuse"]

import math
from collections.abc import Sequence
from typing import Any

from xinfer.errors import ModelError
from xinfer.models.families import Config

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


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


def optional(config: Config, name: str) -> float | None:
    """Return a field that must be a positive number, or None where it is missing or null."""
    return None if config.get(name) is None else number(config, name)


def flag(config: Config, name: str, default: bool = False) -> bool:
    """Return a field that must be true or false; a missing or null one takes the default."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {name}={value!r}, but true or false is expected")
    return default if value is None else value


def activation(config: Config, name: str = "hidden_act", default: str = "silu") -> str:
    """Return an activation by the name that `MlpSpec` has for it."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ModelError(f"config.json: {name}={value!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[value]


def kinds(config: Config, name: str, known: Sequence[str], layers: int) -> list[str] | None:
    """Return a list with one of the known words for each layer, or None where it is missing or null."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != layers or any(kind not in known for kind in value):
        raise ModelError(f"config.json: {name} must name {' or '.join(known)} {layers} times")
    return value


def refuse(config: Config, name: str, *accepted: Any) -> None:
    """Refuse a field whose value would need something that the family does not do."""
    if config.get(name) not in (None, *accepted):
        raise ModelError(f"config.json: {name}={config[name]!r} is not supported (supported: {list(accepted)})")
