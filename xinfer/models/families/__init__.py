"""Families of decoders: one file each, found by its name, which is the `model_type` of config.json.

A file has `spec`, `NAMES`, and `MODEL_TYPES` where it describes others than the one that it is named after.
"""

__all__ = ["Family", "xinfer_model_families"]

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from xinfer.hookspecs import hookimpl
from xinfer.models.gguf.architecture import Architecture
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How to understand one family's checkpoints.

    Attributes:
        name: its `model_type`.
        spec: from config.json to a description; a `ModelError` names what it can't describe.
        names: from a checkpoint's names of tensors to the canonical ones (`DecoderSpec.tensors`).
        gguf: how its GGUF files are translated, where xinfer does not know that by itself.
    """

    name: str
    spec: Callable[[Config], DecoderSpec]
    names: Names
    gguf: tuple[Architecture, ...] = ()


@hookimpl
def xinfer_model_families() -> list[Family]:
    """Return the families of this folder; a file whose name begins with `_` is none."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    return [
        Family(model_type, module.spec, module.NAMES)
        for name, module in modules.items()
        for model_type in getattr(module, "MODEL_TYPES", (name,))
    ]
