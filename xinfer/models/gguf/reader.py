"""GGUF files, one or the parts of one: headers, every length checked against the file, and tensors, dequantized.

Our own reader of the header, since the `gguf` package's takes 2.6 s for a vocabulary of 49,152 (this one 0.1 s) and
trusts the file's offsets; that package still knows the types and undoes the quantization.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

__all__ = ["GgufReader"]

import math
import re
import struct
from collections.abc import Iterator
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
from xinfer.models.mapped_file import MappedFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 3
# What a header may hold, so that any is read or refused within about a second: a vocabulary of 500,000 tokens, with
# as many scores, types and merges, fits.
_MAX_HEADER = 64 << 20  # bytes
_MAX_VALUES = 1 << 21
_MAX_NAMES = 1 << 16
_MAX_NAME = 1 << 16  # bytes, as the format says
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
_PIECE = 8192  # quantized blocks
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GgufReader:
    """A checkpoint in one file, or in the parts that `split.count` tells of, of which any may be given.

    A missing, damaged or foreign part is a `ModelError` that names it and what is wrong.

    Attributes:
        files: what is read, in the parts' order.
        metadata: what the first part says.
    """

    def __init__(self, path: Path) -> None:
        given = _File(path)
        self.files = _parts(path, given.metadata)
        parts = [given if file == path else _File(file) for file in self.files]
        self.metadata = parts[0].metadata
        self._holder: dict[str, _File] = {}
        for number, part in enumerate(parts):
            told = tuple(part.metadata.get(key) for key in ("split.no", "split.count"))
            if len(parts) > 1 and told != (number, len(parts)):
                raise ModelError(
                    f"{part.path}: split.no={told[0]!r} of split.count={told[1]!r}, but by its name it is "
                    f"{number} of {len(parts)}: give the parts their own names back, or download them again"
                )
            for name in part:
                if name in self._holder:
                    raise ModelError(f"{part.path}: tensor {name!r} is in {self._holder[name].path.name} too")
                self._holder[name] = part
        wanted = self.metadata.get("split.tensors.count", len(self._holder))
        if len(parts) > 1 and wanted != len(self._holder):
            raise ModelError(
                f"{path}: the parts hold {len(self._holder)} tensors, but split.tensors.count={wanted!r}: they are "
                "of different models, download them again"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._holder)

    def __contains__(self, name: str) -> bool:
        return name in self._holder

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost dimension first; one of a type that can't be read is an error."""
        return self._holder[name].shape(name)

    def stored(self, name: str) -> tuple[str, int]:
        """Return the name of a tensor's type, and the bytes that it takes in the file."""
        return self._holder[name].stored(name)

    def load(self, name: str) -> Tensor:
        """Return a tensor, float32 where it was quantized."""
        return self._holder[name].load(name)


def _parts(path: Path, metadata: dict[str, Any]) -> tuple[Path, ...]:
    """Return the files of a checkpoint of which one is given."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= 99_999:
        raise ModelError(f"{path}: split.count={count!r} is no number of parts")
    if count <= 1:
        return (path,)
    name = _PART.fullmatch(path.name)
    if not name or int(name[3]) != count:
        wanted = f"NAME-00001-of-{count:05}.gguf"
        raise ModelError(f"{path}: one of {count} parts, but not named like one ({wanted}): give it its name back")
    files = tuple(path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise ModelError(
            f"{path}: of its {count} parts {', '.join(missing[:20])}{more} are missing: put them beside it"
        )
    return files


class _File:
    """One open file: its metadata, and its tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        cursor = _Cursor(path, self._file.data)
        magic, version = bytes(cursor.take(4)), cursor.number("I")
        if magic != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it begins with {magic!r})")
        if version in (2 << 24, 3 << 24):
            raise ModelError(
                f"{path}: a big-endian GGUF file; only little-endian ones are read: convert it with "
                "gguf_convert_endian.py of llama.cpp"
            )
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are, little-endian)")
        tensors, keys = cursor.count(24, most=_MAX_NAMES), cursor.count(13, most=_MAX_NAMES)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = cursor.name()
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
            name = cursor.name()
            if name in found:
                raise ModelError(f"{self.path}: tensor {name!r} is listed twice")
            if not 1 <= (rank := cursor.number("I")) <= 4:
                raise ModelError(f"{self.path}: tensor {name!r} has {rank} dimensions, but 1 to 4 are possible")
            dims = [cursor.number("Q") for _ in range(rank)]
            found[name] = self._entry(name, dims, cursor.number("I"), cursor.number("Q"), alignment)
        start = -(-cursor.at // alignment) * alignment
        end = start
        for name, entry in sorted(found.items(), key=lambda item: item[1].offset):
            if start + entry.offset < end:
                raise ModelError(f"{self.path}: tensor {name!r} overlaps the one before it")
            end = start + entry.offset + entry.size
            if end > len(self._file):
                raise ModelError(
                    f"{self.path}: tensor {name!r} ends at byte {end}, but the file has {len(self._file)}: it is "
                    "truncated, download it again"
                )
        return {n: _Entry(e.shape, e.kind, start + e.offset, e.size) for n, e in found.items()}

    def _entry(self, name: str, dims: list[int], kind: int, offset: int, alignment: int) -> _Entry:
        if not all(dims):
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
        if entry.kind.name in _PLAIN:
            return self._file.tensor(entry.offset, _PLAIN[entry.kind.name], entry.shape)
        raw = self._file.tensor(entry.offset, torch.uint8, (entry.size,))
        return _dequantized(raw.numpy(), entry.kind).view(entry.shape)

    def _readable(self, name: str) -> _Entry:
        entry = self._tensors[name]
        if not _dequantizes(entry.kind):
            raise ModelError(f"{self.path}: tensor {name!r} has the type {entry.kind.name}, which can't be read")
        return entry


def _dequantized(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> Tensor:
    """Undo a type in pieces that fit the caches.

    The package by itself takes 16 rows at a time, 9,216 numbers in a small model, and holds Python's lock for most of
    the time: 1.4 s for SmolLM2 on two threads of a Zen 4, in these pieces 0.5 to 0.7 s.
    """
    block, size = GGML_QUANT_SIZES[kind]
    result = torch.empty(len(raw) // size * block)  # torch's memory begins at a cache line, NumPy's anywhere
    out = result.numpy()
    for first in range(0, len(raw) // size, _PIECE):
        piece = raw[first * size : (first + _PIECE) * size]
        out[first * block : (first + _PIECE) * block] = dequantize(piece.reshape(1, -1), kind).reshape(-1)
    return result


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
        self.end = min(len(data), _MAX_HEADER)
        self.values = 0  # read so far

    def take(self, size: int) -> memoryview:
        if size > self.end - self.at:
            kind = "truncated or damaged" if self.end == len(self.data) else f"a header of more than {self.end} bytes"
            raise ModelError(f"{self.path}: {kind}, at byte {self.at}: download it again")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, smallest: int, code: str = "Q", most: int = 1 << 64) -> int:
        """Read how many things follow, of at least `smallest` bytes each: no more than the file can hold."""
        count = int(self.number(code))
        if count * smallest > len(self.data) - self.at:
            raise ModelError(f"{self.path}: a count of {count} at byte {self.at} is more than the file can hold")
        if count > most:
            raise ModelError(f"{self.path}: a count of {count} at byte {self.at} is more than the {most} that are read")
        return count

    def name(self) -> str:
        return str(self.take(self.count(1, most=_MAX_NAME)), "utf-8", "replace")

    def string(self) -> str:
        start = self.at + 8
        end = start + int.from_bytes(self.data[self.at : start], "little")
        if end > self.end:
            self.take(end - self.at)  # which says what is wrong
        self.at = end
        return str(self.data[start:end], "utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise ModelError(f"{self.path}: a metadata value of unknown type {kind} at byte {self.at}")
        inner = self.number("I")
        size = struct.calcsize("<" + _SCALARS[inner]) if inner in _SCALARS else 8 if inner == _STRING else 12
        weight = 16 if inner == _ARRAY else 1  # arrays of arrays are slow to read, and nobody has them
        count = self.count(size, most=(_MAX_VALUES - self.values) // weight)
        self.values += count * weight
        if inner in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(count * size)))
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return [self.value(inner, depth + 1) for _ in range(count)]
