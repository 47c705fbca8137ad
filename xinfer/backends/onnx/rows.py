"""Keys and values on a CPU: one row of memory for each sequence, taken from the system as it is filled.

The operator reads and writes a dense range of rows, sequence by sequence. The engine's blocks are such rows, in any
order; where the sequences of a call don't lie side by side, rows change places until they do.
"""

__all__ = ["Rows", "window"]

import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_MAPPED = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)}
    if hasattr(mmap, "MAP_PRIVATE")
    else {}
)


class Rows:
    """A cache of so many rows of so many slots, of which only what was written takes memory.

    Args:
        heads: of each tensor [rows, G, slots, D], its G and D.
        count, slots: rows, and tokens that one can hold.
        dtype: of keys and values.

    Attributes:
        tensors: as `heads` orders them.
        row_of: [count] of each block its row.
        filled: [count] of each block the tokens that were written.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], count: int, slots: int, dtype: torch.dtype) -> None:
        self.count, self.slots = count, slots
        sizes = [count * groups * slots * width for groups, width in heads]
        self._memory = [mmap.mmap(-1, size * dtype.itemsize, **_MAPPED) for size in sizes]
        self.tensors = [
            torch.frombuffer(memory, dtype=dtype, count=size).view(count, groups, slots, width)
            for memory, size, (groups, width) in zip(self._memory, sizes, heads, strict=True)
        ]
        self.row_of = np.arange(count)
        self.filled = np.zeros(count, np.int64)
        self._block_of = np.arange(count)

    @property
    def numpy_dtype(self) -> type[np.generic]:
        """What NumPy calls the precision."""
        return np.int8 if self.tensors[0].dtype == torch.int8 else np.float32

    def gather(self, blocks: NDArray[np.integer]) -> int:
        """Bring blocks' rows side by side, in any order; return the first."""
        rows = self.row_of[blocks]
        if len(rows) == 1:
            return int(rows[0])
        first = int(rows.min())
        if rows.max() - first == len(rows) - 1:
            return first
        first = window(rows, self.count)
        inside = (rows >= first) & (rows < first + len(rows))
        if not inside.all():
            holes = np.setdiff1d(np.arange(first, first + len(rows)), rows[inside])
            for row, hole in zip(rows[~inside].tolist(), holes.tolist(), strict=True):
                self._swap(row, hole)
        return first

    def _swap(self, a: int, b: int) -> None:
        """Let two rows change places with what they hold."""
        block_a, block_b = int(self._block_of[a]), int(self._block_of[b])
        from_a, from_b = int(self.filled[block_a]), int(self.filled[block_b])
        for tensor in self.tensors:
            kept = tensor[a, :, :from_a].clone()
            if from_b:
                tensor[a, :, :from_b] = tensor[b, :, :from_b]
            tensor[b, :, :from_a] = kept
        self._block_of[a], self._block_of[b] = block_b, block_a
        self.row_of[block_a], self.row_of[block_b] = b, a

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one block into another."""
        here, there = int(self.row_of[source]), int(self.row_of[target])
        for tensor in self.tensors:
            tensor[there, :, :tokens] = tensor[here, :, :tokens]
        self.filled[target] = max(self.filled[target], tokens)

    def free(self, blocks: Sequence[int]) -> None:
        """Give the memory of blocks back to the system."""
        for block in blocks:
            if self.filled[block]:
                self.filled[block] = 0
                self._drop(int(self.row_of[block]))

    def _drop(self, row: int) -> None:
        if not sys.platform.startswith("linux"):
            return  # elsewhere such advice does not give anything back
        for memory, tensor in zip(self._memory, self.tensors, strict=True):
            size = tensor[0].numel() * tensor.element_size()
            start = -(-row * size // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (row + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Give back all memory; nobody may look at the tensors any more."""
        self.tensors = []
        for memory in self._memory:
            memory.close()


def window(rows: NDArray[np.integer], count: int) -> int:
    """Return where a range of len(rows) rows begins that holds as many of them as any does."""
    rows = np.sort(rows)
    ends = np.searchsorted(rows, rows + len(rows))
    best = int((ends - np.arange(len(rows))).argmax())
    return min(int(rows[best]), count - len(rows))
