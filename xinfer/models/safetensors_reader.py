"""Safetensors files: which of a folder's are read, and their headers, checked before they are trusted."""

__all__ = ["read_safetensors", "safetensors_files"]

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from xinfer.errors import ModelError
from xinfer.models.weights import Tensors

_MAX_HEADER = 100_000_000  # bytes; the format's own limit


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
