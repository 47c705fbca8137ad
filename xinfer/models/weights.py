"""Weights by canonical name, read when asked for; and safetensors files, checked before they are trusted."""

__all__ = ["Tensors", "Weights", "dummy_weights", "read_safetensors", "safetensors_files"]

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.names import Found, Stored
from xinfer.models.spec import DecoderSpec

_MAX_HEADER = 100_000_000  # bytes; the format's own limit


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
        find: tells what a checkpoint's tensor is; None for one that is not needed.

    A missing, unknown or misshapen tensor is a `ModelError` that names it. Of a tied model with a head of its own the
    head is ignored, as config.json says; `head_differs` tells whether that changes anything (then transformers 5 goes
    against config.json and takes the head, older ones and vLLM do not).
    """

    def __init__(self, spec: DecoderSpec, tensors: Tensors, find: Callable[[str], Found | None]) -> None:
        self.spec, self.files = spec, tensors.files
        self._load = tensors.load
        self._places: dict[str, dict[int | None, _Place]] = {}
        self._spare_head: str | None = None
        unknown = []
        for name, shape in tensors.shapes.items():
            found = find(name)
            if found is None or self._guesses(name):
                continue
            if found.stored.parts == ("head.weight",) and spec.tied:
                self._spare_head = name
            elif not all(self._is_known(part, found.expert) for part in found.stored.parts):
                unknown.append(name)
            else:
                self._place(name, shape, found)
        missing = [name for name in spec.tensors if not self._is_whole(name)]
        if missing or unknown:
            raise ModelError("the checkpoint does not fit its config.json: " + _listed(missing, unknown))

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

    def _take(self, canonical: str, place: "_Place") -> Tensor:
        layer = canonical.split(".")[1]
        heads = self.spec.layers[int(layer)].attention.key_heads if layer.isdecimal() else 1
        axis = _row_axis(canonical)
        return place.stored.take(self._load(place.name), place.shapes, place.index, axis, heads)

    def head_differs(self) -> bool:
        """Whether a tied model's file holds a head that is not its embedding, and so is not used."""
        if self._spare_head is None:
            return False
        return not torch.equal(self._load(self._spare_head), self.load("embed.weight"))


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


def safetensors_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the weight files that a folder's index names (or its only file), and the stray ones beside them."""
    present = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = sorted(set(_weight_map(index)))
        absent = [name for name in named if not (folder / name).is_file()]
        if absent:
            raise ModelError(f"{folder}: the index names {', '.join(absent)}, which is missing: download it again")
        files = [folder / name for name in named]
    elif (folder / "model.safetensors").exists() or len(present) == 1:
        single = folder / "model.safetensors"
        files = [single if single.exists() else present[0]]
    elif present:
        names = ", ".join(p.name for p in present[:5])
        raise ModelError(f"{folder}: several weight files ({names}) but no model.safetensors.index.json: add it")
    else:
        files = []
    if not files:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder}: only pickled weights ({', '.join(pickles[:3])}), which can run code when loaded and are "
                "refused: convert them to safetensors"
            )
        raise ModelError(f"{folder}: no weights found (*.safetensors, or a .gguf file given by name)")
    return files, [p for p in present if p not in files]


def _weight_map(index: Path) -> list[str]:
    try:
        names = list(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index}: not a weight index ({error}): download it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is not the name of a .safetensors file in this folder")
    return names


def read_safetensors(files: list[Path]) -> Tensors:
    """Open files whose headers have been checked; tensors are mapped into memory, not copied."""
    shapes: dict[str, tuple[int, ...]] = {}
    source: dict[str, Any] = {}
    for file in files:
        header = _header(file)
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: damaged or truncated ({error}): download it again") from error
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in source:
                raise ModelError(f"{file}: tensor {name!r} is in another file too: only one may hold it")
            shapes[name], source[name] = tuple(entry["shape"]), opened
    return Tensors(shapes, lambda name: source[name].get_tensor(name), tuple(files))


def _header(file: Path) -> dict[str, Any]:
    """Read a file's header; a name that occurs twice is an error, though the library lets the last one win."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ModelError(f"{file}: the header names {name!r} twice: the file is not valid safetensors")
            found[name] = value
        return found

    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER, file.stat().st_size):
                raise ModelError(f"{file}: damaged or truncated (a header of {length} bytes): download it again")
            header = json.loads(stream.read(length), object_pairs_hook=unique)
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: damaged or truncated (no valid header): download it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: damaged (its header is no object): download it again")
    return header


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
