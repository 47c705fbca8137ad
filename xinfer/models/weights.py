"""Weights by canonical name, read when asked for."""

__all__ = ["Tensors", "Weights", "dummy_weights"]

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """A checkpoint's tensors: shapes without reading them, and how to read one.

    Attributes:
        shapes: by the name that the checkpoint gives them.
        load: returns one, on the CPU, in the precision it is stored in (float32 where it was quantized).
        files: what they come from.
    """

    shapes: dict[str, tuple[int, ...]]
    load: Callable[[str], Tensor]
    files: tuple[Path, ...]


class Weights:
    """A checkpoint's tensors under canonical names, checked against a spec before any is read.

    Args:
        spec: what the model needs.
        tensors: what the checkpoint has.
        rename: from its names to canonical ones; None for a tensor that is not needed.

    A missing, unknown or misshapen tensor is a `ModelError` that names it. Of a tied model with a head of its own the
    head is ignored, as config.json says; `head_differs` tells whether that changes anything (then transformers 5 goes
    against config.json and takes the head, older ones and vLLM do not).
    """

    def __init__(self, spec: DecoderSpec, tensors: Tensors, rename: Callable[[str], str | None]) -> None:
        self.spec, self.files = spec, tensors.files
        self._load = tensors.load
        self._names: dict[str, str] = {}
        unknown = []
        self._spare_head: str | None = None
        for name, shape in tensors.shapes.items():
            canonical = rename(name)
            if canonical is None:
                continue
            if canonical == "head.weight" and spec.tied:
                self._spare_head = name
            elif canonical not in spec.tensors:
                unknown.append(name)
            elif shape != spec.tensors[canonical]:
                wanted = list(spec.tensors[canonical])
                raise ModelError(f"tensor {name!r} has the shape {list(shape)}, but config.json asks for {wanted}")
            elif canonical in self._names:
                raise ModelError(f"the checkpoint holds one tensor twice, as {self._names[canonical]!r} and {name!r}")
            else:
                self._names[canonical] = name
        missing = [name for name in spec.tensors if name not in self._names]
        if missing or unknown:
            raise ModelError("the checkpoint does not fit its config.json: " + _listed(missing, unknown))

    def __iter__(self) -> Iterator[str]:
        return iter(self.spec.tensors)

    def load(self, canonical: str) -> Tensor:
        """Return one tensor, on the CPU."""
        return self._load(self._names[canonical])

    def head_differs(self) -> bool:
        """Whether a tied model's file holds a head that is not its embedding, and so is not used."""
        if self._spare_head is None:
            return False
        return not torch.equal(self._load(self._spare_head), self.load("embed.weight"))


def _listed(missing: list[str], unknown: list[str]) -> str:
    parts = []
    for kind, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"it {kind} {', '.join(repr(n) for n in names[:5])}{more}")
    return "; ".join(parts)


def dummy_weights(spec: DecoderSpec, seed: int = 0) -> Tensors:
    """Return random weights for a spec, for benchmarks without a checkpoint: scaled so that activations stay sound.

    Each tensor depends on the seed and its place alone, not on the order in which they are asked for.
    """
    places = {name: i for i, name in enumerate(spec.tensors)}

    def load(name: str) -> Tensor:
        shape = spec.tensors[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        generator = torch.Generator().manual_seed((seed << 20) + places[name])
        scale = 1.0 if name == "embed.weight" and not spec.tied else 1 / math.sqrt(shape[1])
        return torch.empty(shape).normal_(0, scale, generator=generator)

    return Tensors(dict(spec.tensors), load, ())
