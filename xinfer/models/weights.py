"""Weights by canonical name, read when asked for."""

__all__ = ["Tensors", "Weights"]

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.names import Found, Stored
from xinfer.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """A checkpoint's tensors: shapes without reading them, and how to read one.

    Attributes:
        shapes: by the name that the checkpoint gives them.
        load: returns one, on the CPU, in the precision it is stored in (float32 where it was quantized).
        files: what they come from.
        kinds: how each is stored, by the format's name for it (`BF16`, `Q4_1`), and the bytes it takes; empty where
            nothing is stored.
    """

    shapes: dict[str, tuple[int, ...]]
    load: Callable[[str], Tensor]
    files: tuple[Path, ...]
    kinds: Mapping[str, tuple[str, int]] = field(default_factory=dict)


class Weights:
    """A checkpoint's tensors under canonical names, checked against a spec before any is read.

    Args:
        spec: what the model needs.
        tensors: what the checkpoint has.
        find: tells what a checkpoint's tensor is; None for one that is not needed.
        whole: whether there must be all that the spec has; an adapter has a part of it.

    A missing, unknown or misshapen tensor is a `ModelError` that names it. Of a tied model with a head of its own the
    head is ignored, as config.json says; `head_differs` tells whether that changes anything (then transformers 5 goes
    against config.json and takes the head, older ones and vLLM do not).
    """

    def __init__(
        self, spec: DecoderSpec, tensors: Tensors, find: Callable[[str], Found | None], *, whole: bool = True
    ) -> None:
        self.spec, self.files = spec, tensors.files
        self._load, self._kinds = tensors.load, tensors.kinds
        self._places: dict[str, dict[int | None, _Place]] = {}
        self._fused: tuple[str, Tensor] | None = None  # the last that was read, whose other parts come next
        self._one_at_a_time = threading.Lock()
        self.spare_head: str | None = None  # of a tied model, the checkpoint's name of a head that is not used
        unknown = []
        for name, shape in tensors.shapes.items():
            found = find(name)
            if found is None or self._guesses(name):
                continue
            if found.stored.parts == ("head.weight",) and spec.tied:
                self.spare_head = name
            elif not all(self._is_known(part, found.expert) for part in found.stored.parts):
                unknown.append(name)
            else:
                self._place(name, shape, found)
        missing = [name for name in spec.tensors if whole and not self._is_whole(name)]
        if missing or unknown:
            what = "the checkpoint does not fit its config.json: " if whole else ""
            raise ModelError(what + _listed(missing, unknown))

    def _guesses(self, name: str) -> bool:
        layer = re.search(r"\blayers\.(\d{1,6})\.", name)
        last = len(self.spec.layers)
        return layer is not None and last <= int(layer[1]) < last + self.spec.guessing_layers

    def _is_known(self, part: str, expert: int | None) -> bool:
        return part in self.spec.tensors and (expert is None or expert < self.spec.tensors[part][0])

    def _place(self, name: str, shape: tuple[int, ...], found: Found) -> None:
        parts = found.stored.parts
        shapes = [self.spec.tensors[part][found.expert is not None :] for part in parts]
        wanted = found.stored.shape(shapes, _row_axis(parts[0]))
        if shape != wanted:
            raise ModelError(f"tensor {name!r} has the shape {list(shape)}, but config.json asks for {list(wanted)}")
        for index, part in enumerate(parts):
            places = self._places.setdefault(part, {})
            if found.expert in places or (places and None in {found.expert, *places}):
                other = next(iter(places.values())).name
                raise ModelError(f"the checkpoint holds one tensor twice, as {other!r} and {name!r}")
            places[found.expert] = _Place(name, found.stored, shapes, index)

    def _is_whole(self, canonical: str) -> bool:
        places = self._places.get(canonical, {})
        return None in places or (bool(places) and len(places) == self.spec.tensors[canonical][0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.spec.tensors)

    def load(self, canonical: str) -> Tensor:
        """Return one tensor, on the CPU: a view of the file where it lies there as it is needed."""
        places = self._places[canonical]
        if None in places:
            return self._take(canonical, places[None])
        return torch.stack([self._take(canonical, places[expert]) for expert in range(len(places))])

    def holds(self, canonical: str) -> bool:
        """Whether there is anything of a tensor."""
        return canonical in self._places

    def pieces(self, canonical: str) -> Iterator[tuple[int | None, Tensor]]:
        """Yield what there is of one tensor, which may be nothing: each expert's by its number, or all under None."""
        for expert, place in self._places.get(canonical, {}).items():
            yield expert, self._take(canonical, place)

    def _take(self, canonical: str, place: "_Place") -> Tensor:
        layer = canonical.split(".")[1]
        heads = self.spec.layers[int(layer)].attention.key_heads if layer.isdecimal() else 1
        axis = _row_axis(canonical)
        return place.stored.take(self._read(place), place.shapes, place.index, axis, heads)

    def _read(self, place: "_Place") -> Tensor:
        """Return what a checkpoint stores there; what holds several parts is read once for those that follow."""
        last = len(place.stored.parts) - 1
        if not last:
            return self._load(place.name)
        with self._one_at_a_time:
            if self._fused is None or self._fused[0] != place.name or not place.index:
                self._fused = place.name, self._load(place.name)
            tensor = self._fused[1]
            if place.index == last:
                self._fused = None
        return tensor

    def stored(self) -> Iterator[tuple[str, str, int]]:
        """Yield (canonical name, how it is stored, bytes) of what is needed of the files, from their headers alone.

        A stored tensor that holds several canonical ones, or several experts', comes once, under the first of them.
        """
        places = ((canonical, place.name) for canonical, them in self._places.items() for place in them.values())
        first: dict[str, str] = {}
        for canonical, name in places:
            first.setdefault(name, canonical)
        for name, canonical in first.items():
            if name in self._kinds:
                yield canonical, *self._kinds[name]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files, those that are not needed among them."""
        return sum(size for _, size in self._kinds.values())

    def head_differs(self) -> bool:
        """Whether a tied model's file holds a head that is not its embedding, and so is not used."""
        if self.spare_head is None:
            return False
        embedding = Weights.load(self, "embed.weight")  # the file's own, whatever is merged into it
        return not torch.equal(self._load(self.spare_head), embedding)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a canonical tensor lies, or one expert's part of it: one of the parts of a checkpoint's tensor."""

    name: str
    stored: Stored
    shapes: list[tuple[int, ...]]
    index: int


def _row_axis(canonical: str) -> int:
    """Return which axis has the rows, from the end: matrices have columns behind them, also stacked ones."""
    return -2 if canonical.endswith(".weight") and "norm" not in canonical else -1


def _listed(missing: list[str], unknown: list[str]) -> str:
    parts = []
    for kind, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"it {kind} {', '.join(repr(n) for n in names[:5])}{more}")
    return "; ".join(parts)
