"""Families of decoders: one file each, found by its name, which is the `model_type` of config.json."""

__all__ = ["Family", "xinfer_model_families"]

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from xinfer.hookspecs import hookimpl
from xinfer.models.spec import DecoderSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How to understand one family's checkpoints.

    Attributes:
        name: its `model_type`.
        spec: from config.json to a description; a `ModelError` names what it can't describe.
        rename: from a checkpoint's name of a tensor to the canonical one (`DecoderSpec.tensors`), or None for
            a tensor that inference does not need.
    """

    name: str
    spec: Callable[[Config], DecoderSpec]
    rename: Callable[[str], str | None]


@hookimpl
def xinfer_model_families() -> list[Family]:
    """Return the families of this folder; a file whose name begins with `_` is none."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [import_module(f"{__name__}.{name}") for name in names]
    return [Family(m.__name__.rpartition(".")[2], m.spec, m.rename) for m in modules]
