"""Numbers on their way between the host and a device, without either waiting for the other."""

__all__ = ["Awaited", "send", "send_together"]

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 4  # numbers: graphs that are compiled ahead of time copy tensors that begin elsewhere, and say so each time


def send(values: NDArray[Any] | Rows[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return host numbers on a device, in the precision asked for; on a CPU an array's own memory.

    A CUDA device takes them when it comes to that, from pinned memory, which torch uses again only afterwards; for
    ordinary memory the host would wait until the device has done all that it was given before.
    """
    host = torch.from_numpy(np.asarray(values))
    if device.type == "cuda":
        host = host.pin_memory().to(device, non_blocking=True)
    return host if dtype is None else host.to(dtype)


def send_together(arrays: Rows[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Return arrays on a device as int32, sent as one; each begins where kernels may load several numbers at once."""
    room = [-(-each.size // _ALIGNED) * _ALIGNED for each in arrays]
    whole = np.zeros(sum(room), np.int32)
    for start, each in zip(np.cumsum([0, *room]), arrays, strict=False):
        np.copyto(whole[start : start + each.size], each.ravel(), casting="same_kind")
    parts = torch.split(send(whole, device), room)
    return [part[: each.size].view(each.shape) for part, each in zip(parts, arrays, strict=True)]


class Awaited:
    """A device's tensor on its way to the host.

    Args:
        tensor: what is copied once the device has computed it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._there = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Return it on the host, after waiting for it."""
        if self._there is not None:
            self._there.synchronize()
        return self._host
