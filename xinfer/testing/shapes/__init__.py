"""Tiny models of every family, as their config.json says it: between them they use every field of `DecoderSpec`.

A file is found by its name, which is the family's. Its `SHAPES` are configs by name, without the `model_type`; the
first is what the family's checkpoints usually are. Its `NEEDED`, if it has any, is what a config that leaves out all
that it can must say besides sizes: the vocabulary, 8 layers of 2048, 32 heads.
"""

__all__ = ["SHAPES", "needed", "shape"]

import pkgutil
from importlib import import_module
from typing import Any

_MODULES: dict[str, Any] = {
    found.name: import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if not found.name.startswith("_")
}

SHAPES: dict[str, tuple[str, ...]] = {family: tuple(module.SHAPES) for family, module in _MODULES.items()}


def shape(family: str, name: str) -> dict[str, Any]:
    """Return a config.json's content, of one of the `SHAPES` of a family."""
    return {"model_type": family, **_MODULES[family].SHAPES[name]}


def needed(family: str) -> dict[str, Any]:
    """Return what a config of a family can't leave out, besides sizes."""
    return dict(getattr(_MODULES[family], "NEEDED", {}))
