"""Safetensors files: which of a folder's are read, and their headers, checked before they are trusted."""

__all__ = ["read_safetensors", "safetensors_files"]

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.files import read_json
from xinfer.models.mapped_file import MappedFile
from xinfer.models.weights import Tensors

# Parsed in about a second, and room for 70,000 tensors in one file. The format allows 100 MB.
_MAX_HEADER = 8 << 20  # bytes
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def safetensors_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the weight files that a folder's index names (or its only file), and the stray ones beside them."""
    present = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(_index(index))]
        there = {path.name for path in present}
        if absent := [path.name for path in files if path.name not in there or not path.exists()]:
            more = f" and {len(absent) - 20} more" if len(absent) > 20 else ""
            names = ", ".join(map(repr, absent[:20])) + more
            raise ModelError(f"{folder}: the index names {names}, which is missing: download it again")
    elif (single := folder / "model.safetensors") in present or len(present) == 1:
        files = [single if single in present else present[0]]
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


def _index(file: Path) -> set[str]:
    """Return the names of the files that an index names; all tensors in them count, as for transformers."""
    names = read_json(file).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{file}: not a weight index (its weight_map is {names!r:.50}): download it again")
    for name in names.values():
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{file}: {name!r} is not the name of a .safetensors file in this folder")
    return set(names.values())


@dataclass(frozen=True, slots=True)
class _Stored:
    file: MappedFile
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_safetensors(files: list[Path]) -> Tensors:
    """Open files, their headers checked; tensors are mapped into memory, not copied.

    One of a type that torch has no word for is an error when it is asked for.
    """
    found: dict[str, _Stored] = {}
    holder: dict[str, Path] = {}
    for file in files:
        mapped = MappedFile(file)
        header, data = _header(file, mapped)
        for name, entry in header.items():
            if name in found:
                raise ModelError(
                    f"{file}: tensor {name!r} is in another file too, {holder[name].name}: only one may hold it"
                )
            (start, end), holder[name] = entry["data_offsets"], file
            found[name] = _Stored(mapped, entry["dtype"], tuple(entry["shape"]), data + start, end - start)

    def load(name: str) -> Tensor:
        stored = found[name]
        if stored.kind not in _TYPES:
            raise ModelError(f"{holder[name]}: tensor {name!r} has the type {stored.kind}, which can't be read")
        return stored.file.tensor(stored.start, _TYPES[stored.kind], stored.shape)

    shapes = {name: stored.shape for name, stored in found.items()}
    return Tensors(shapes, load, tuple(files), {name: (stored.kind, stored.size) for name, stored in found.items()})


def _header(file: Path, mapped: MappedFile) -> tuple[dict[str, Any], int]:
    """Return what a file's header says of each tensor, and where the data begins.

    The library judges the header. That a name occurs twice it would not mind, and let the last one win.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            raise ModelError(f"{file}: the header names {twice!r} twice: the file is not valid safetensors")
        return found

    length = int.from_bytes(mapped.data[:8], "little")
    if length > len(mapped) - 8:
        raise ModelError(f"{file}: damaged or truncated (a header of {length} bytes): download it again")
    if length > _MAX_HEADER:
        raise ModelError(f"{file}: a header of {length} bytes, more than the {_MAX_HEADER} that are read: replace it")
    try:
        with safe_open(file, framework="np"):
            header = json.loads(bytes(mapped.data[8 : 8 + length]), object_pairs_hook=unique)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: damaged or truncated ({error}): download it again") from error
    header.pop("__metadata__", None)
    return header, 8 + length
