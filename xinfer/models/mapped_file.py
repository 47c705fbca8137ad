"""Files mapped into memory, whose pages are given back once they have been used."""

__all__ = ["MappedFile", "copied"]

import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from xinfer.errors import ModelError

# MAP_NORESERVE, which Python has a name for since 3.13; this is Linux's number for it.
_NO_PROMISE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

Empty = Callable[[Sequence[int], torch.dtype], Tensor]

_copied: ContextVar[Empty | None] = ContextVar("copied", default=None)


class MappedFile:
    """A file's bytes, read when they are looked at; `len` is their number.

    Pages that were looked at count as this process's memory for as long as they are mapped. So each tensor's are given
    back when it goes: while a checkpoint is turned into a model, it is not there twice. Whoever still sees such a page
    through another tensor reads it again, from the file or the system's cache of it: nobody writes to the mapping, so
    giving back is never wrong.

    A directory, a pipe or a file that can't be read is a `ModelError`.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: not a file, though its name says so: replace it by the checkpoint's own")
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._file)
            self._map = _mapping(self._file)
        except (OSError, ValueError) as error:  # a ValueError where the file is empty
            raise ModelError(f"{path}: can't be read ({error}): download it again") from error
        self._path, self.data = path, memoryview(self._map)

    def __len__(self) -> int:
        return len(self.data)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the numbers from byte `start` on as a tensor, which is not to be written to."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if (empty := _copied.get()) is not None:
            return self._copied(start, empty(shape, dtype))
        tensor = torch.frombuffer(self.data, dtype=dtype, count=count, offset=start).view(shape)
        weakref.finalize(tensor, self.give_back, start, tensor.nbytes).atexit = False
        return tensor

    def _copied(self, start: int, into: Tensor) -> Tensor:
        left = into.view(-1).view(torch.uint8).numpy().data
        if not hasattr(os, "preadv"):
            left[:] = self.data[start : start + len(left)]
            return into
        if hasattr(os, "posix_fadvise"):  # the disk then works on all of it at once
            os.posix_fadvise(self._file, start, len(left), os.POSIX_FADV_WILLNEED)
        while left:
            count = os.preadv(self._file, [left], start)
            if not count:
                raise ModelError(f"{self._path}: ends before byte {start + len(left)}, as it did not: it was changed")
            start, left = start + count, left[count:]
        return into

    def give_back(self, start: int, size: int) -> None:
        """Let these bytes' pages go until they are looked at again."""
        if hasattr(mmap, "MADV_DONTNEED") and size:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@contextmanager
def copied(empty: Empty = _empty) -> Iterator[None]:
    """Have tensors read into memory of their own, by this thread, instead of mapped; `empty` makes room for one.

    That is for what is used once and read again: each page that is mapped and given back interrupts all threads. A step
    of SmolLM2 in int8, of whose 30 layers 26 were brought in, took 43 ms so, and copied 28 (two Zen 5 cores,
    2026-11-30).
    """
    token = _copied.set(empty)
    try:
        yield
    finally:
        _copied.reset(token)


def _mapping(file: int) -> mmap.mmap:
    """Map a file privately: torch asks for memory that it might write.

    Such a mapping is promised memory as if all of it would be written, and one of a file larger than the machine's
    memory is refused, unless no promise is asked for.
    """
    if sys.platform == "win32":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(file, 0, mmap.MAP_PRIVATE | _NO_PROMISE, mmap.PROT_READ | mmap.PROT_WRITE)
