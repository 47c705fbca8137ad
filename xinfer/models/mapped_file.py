"""Files mapped into memory, whose pages are given back once they have been used."""

__all__ = ["MappedFile"]

import math
import mmap
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor

from xinfer.errors import ModelError

# MAP_NORESERVE, which Python has a name for since 3.13; this is Linux's number for it.
_NO_PROMISE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


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
            with path.open("rb") as file:
                self._map = _mapping(file.fileno())
        except (OSError, ValueError) as error:  # a ValueError where the file is empty
            raise ModelError(f"{path}: can't be read ({error}): download it again") from error
        self.data = memoryview(self._map)

    def __len__(self) -> int:
        return len(self.data)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the numbers from byte `start` on as a tensor, which is not to be written to."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self.data, dtype=dtype, count=count, offset=start).view(shape)
        weakref.finalize(tensor, self.give_back, start, tensor.nbytes).atexit = False
        return tensor

    def give_back(self, start: int, size: int) -> None:
        """Let these bytes' pages go until they are looked at again."""
        if hasattr(mmap, "MADV_DONTNEED") and size:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)


def _mapping(file: int) -> mmap.mmap:
    """Map a file privately: torch asks for memory that it might write.

    Such a mapping is promised memory as if all of it would be written, and one of a file larger than the machine's
    memory is refused, unless no promise is asked for.
    """
    if sys.platform == "win32":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(file, 0, mmap.MAP_PRIVATE | _NO_PROMISE, mmap.PROT_READ | mmap.PROT_WRITE)
