"""A GGUF file's header, every length checked against the file, and its tensors, dequantized.

Our own reader of the header, since the `gguf` package's takes 2.6 s for a vocabulary of 49,152 (this one 0.1 s) and
trusts the file's offsets; that package still knows the types and undoes the quantization.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

__all__ = ["GgufReader"]

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from xinfer.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 3
_PIECE = 8192  # quantized blocks
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GgufReader:
    """An open file: its `metadata`, and its tensors by name. A `ModelError` names what is wrong with a damaged one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, np.uint8, "c")  # a private mapping: torch asks for memory it might write
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: can't be read as a GGUF file ({error})") from error
        self._data = data
        cursor = _Cursor(path, data.data)
        magic, version = bytes(cursor.take(4)), cursor.number("I")
        if magic != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it begins with {magic!r})")
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are, little-endian)")
        tensors, keys = cursor.count(24), cursor.count(13)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = cursor.string()
            if name in self.metadata:
                raise ModelError(f"{path}: the metadata names {name!r} twice")
            self.metadata[name] = cursor.value(cursor.number("I"))
        self._tensors = self._read_tensors(cursor, tensors)

    def _read_tensors(self, cursor: "_Cursor", count: int) -> dict[str, _Entry]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment={alignment!r} is no power of two")
        found: dict[str, _Entry] = {}
        for _ in range(count):
            name = cursor.string()
            if name in found:
                raise ModelError(f"{self.path}: tensor {name!r} is listed twice")
            dims = [cursor.number("Q") for _ in range(cursor.count(8, "I"))]
            found[name] = self._entry(name, dims, cursor.number("I"), cursor.number("Q"), alignment)
        start = -(-cursor.at // alignment) * alignment
        end = start
        for name, entry in sorted(found.items(), key=lambda item: item[1].offset):
            if start + entry.offset < end:
                raise ModelError(f"{self.path}: tensor {name!r} overlaps the one before it")
            end = start + entry.offset + entry.size
            if end > len(self._data):
                raise ModelError(
                    f"{self.path}: tensor {name!r} ends at byte {end}, but the file has {len(self._data)}: it is "
                    "truncated, download it again"
                )
        return {n: _Entry(e.shape, e.kind, start + e.offset, e.size) for n, e in found.items()}

    def _entry(self, name: str, dims: list[int], kind: int, offset: int, alignment: int) -> _Entry:
        if not 1 <= len(dims) <= 4 or not all(dims):
            raise ModelError(f"{self.path}: tensor {name!r} has the dimensions {dims}")
        if offset % alignment:
            raise ModelError(f"{self.path}: tensor {name!r} begins at {offset}, which is not aligned to {alignment}")
        try:
            quantization = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from None
        if dims[0] % block:
            raise ModelError(
                f"{self.path}: tensor {name!r} has rows of {dims[0]}, which are no whole blocks of {block} "
                f"({quantization.name})"
            )
        return _Entry(tuple(reversed(dims)), quantization, offset, math.prod(dims) // block * size)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost dimension first; one of a type that can't be read is an error."""
        return self._readable(name).shape

    def stored(self, name: str) -> tuple[str, int]:
        """Return the name of a tensor's type, and the bytes that it takes in the file."""
        entry = self._tensors[name]
        return entry.kind.name, entry.size

    def load(self, name: str) -> Tensor:
        """Return a tensor, float32 where it was quantized."""
        entry = self._readable(name)
        raw = self._data[entry.offset : entry.offset + entry.size]
        if entry.kind.name in _PLAIN:
            return torch.frombuffer(raw.data, dtype=_PLAIN[entry.kind.name]).view(entry.shape)
        return torch.from_numpy(_dequantized(raw, entry.kind)).view(entry.shape)

    def _readable(self, name: str) -> _Entry:
        entry = self._tensors[name]
        if not _dequantizes(entry.kind):
            raise ModelError(f"{self.path}: tensor {name!r} has the type {entry.kind.name}, which can't be read")
        return entry


def _dequantized(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """Undo a type in pieces that fit the caches.

    The package by itself takes 16 rows at a time, 9,216 numbers in a small model, and holds Python's lock for most of
    the time: 1.4 s for SmolLM2 on two threads of a Zen 4, in these pieces 0.5 to 0.7 s.
    """
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty(len(raw) // size * block, np.float32)
    for first in range(0, len(raw) // size, _PIECE):
        piece = raw[first * size : (first + _PIECE) * size]
        out[first * block : (first + _PIECE) * block] = dequantize(piece.reshape(1, -1), kind).reshape(-1)
    return out


def _dequantizes(kind: GGMLQuantizationType, known: dict[GGMLQuantizationType, bool] = {}) -> bool:  # noqa: B006
    """Whether the gguf package can undo a type: tried once, on an empty block."""
    if kind not in known:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            known[kind] = True
        except NotImplementedError:
            known[kind] = False
    return known[kind]


class _Cursor:
    """Reads a file's header from front to back; whatever would lie outside the file is an error."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise ModelError(f"{self.path}: truncated or damaged at byte {self.at}: download it again")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, smallest: int, code: str = "Q") -> int:
        """Read how many things follow, of at least `smallest` bytes each: no more than the file can hold."""
        count = int(self.number(code))
        if count * smallest > len(self.data) - self.at:
            raise ModelError(f"{self.path}: a count of {count} at byte {self.at} is more than the file can hold")
        return count

    def string(self) -> str:
        return str(self.take(self.count(1)), "utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise ModelError(f"{self.path}: a metadata value of unknown type {kind} at byte {self.at}")
        inner = self.number("I")
        read: Callable[[], Any] = self.string if inner == _STRING else lambda: self.value(inner, depth + 1)
        if inner in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[inner])
            count = self.count(size)
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(count * size)))
        return [read() for _ in range(self.count(8 if inner == _STRING else 12))]
