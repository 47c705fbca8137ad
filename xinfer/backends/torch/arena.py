"""Memory that is used again and again, since what the system gives and takes back in between costs more than it."""

__all__ = ["Arena"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 64  # bytes, a cache line


class Arena:
    """Room for tensors that all go at once.

    How much is needed shows as it is used: what does not fit lies elsewhere once, and has room after the next `clear`.

    Args:
        device: where it is.
        pinned: whether a CUDA device can read it by itself.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._bytes, self._pinned = torch.empty(0, dtype=torch.uint8, device=device), pinned
        self._used = 0

    def clear(self) -> None:
        """Take all room for what comes next; nothing of what was there may still be in use."""
        if self._used > len(self._bytes):
            device, self._bytes = self._bytes.device, torch.empty(0)
            self._bytes = torch.empty(self._used, dtype=torch.uint8, device=device, pin_memory=self._pinned)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape that holds anything."""
        start, size = self._used, math.prod(shape) * dtype.itemsize
        self._used += -(-size // _ALIGNED) * _ALIGNED
        if start + size > len(self._bytes):
            return torch.empty(shape, dtype=dtype, device=self._bytes.device, pin_memory=self._pinned)
        return self._bytes[start : start + size].view(dtype).view(shape)

    def join(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Return copies of tensors, one behind the other along a dimension."""
        shape = list(tensors[0].shape)
        shape[dim] = sum(each.shape[dim] for each in tensors)
        out, at = self.empty(shape, tensors[0].dtype), 0
        for each in tensors:
            out.narrow(dim, at, each.shape[dim]).copy_(each)
            at += each.shape[dim]
        return out
