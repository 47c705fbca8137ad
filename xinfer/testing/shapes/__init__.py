"""Tiny models of every family, as their config.json says it: between them they use every field of `DecoderSpec`.

A file is found by its name, which is the family's; its `SHAPES` are configs by name.
"""

__all__ = ["SHAPES", "shape"]

import pkgutil
from importlib import import_module
from typing import Any

_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    found.name: import_module(f"{__name__}.{found.name}").SHAPES
    for found in pkgutil.iter_modules(__path__)
    if not found.name.startswith("_")
}

SHAPES: dict[str, tuple[str, ...]] = {family: tuple(configs) for family, configs in _CONFIGS.items()}


def shape(family: str, name: str) -> dict[str, Any]:
    """Return a config.json's content, of one of the `SHAPES` of a family."""
    return {"model_type": family, **_CONFIGS[family][name]}
