"""Weights read ahead of their use, onto a device and in the precision to compute in."""

__all__ = ["Reader", "give_back", "read"]

import ctypes
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.weights import Weights

_AHEAD = 64 << 20  # bytes of weights, read before they are asked for


class Reader:
    """Reads weights ahead of their use on as many threads as there are cores, since dequantizing takes a while.

    As many bytes are read ahead as hardly show beside the whole model, in the precision to compute in. The embedding
    is read first and does not count: it stays in memory as it is. What conversion and packing leave behind is given
    back to the system as they go.

    Args:
        weights: what is read.
        device, dtype: where it goes, and in which precision, but for what keeps float32.
        names: what will be asked for, in this order as far as possible; None for everything.
    """

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, names: Iterable[str] | None = None
    ) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype
        self.spec = weights.spec
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in weights.spec.tensors.items()}
        self._bytes = Counter(sizes)  # which has 0 of what is not the spec's
        self._most = max(_AHEAD, sum(self._bytes.values()) // 20)
        self._bytes["embed.weight"] = 0
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="weights")
        self._names, self._used = deque(weights if names is None else names), 0
        self._pending: dict[str, Future[Tensor]] = {}
        self._read_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        give_back()

    def _read_on(self) -> None:
        waiting = sum(self._bytes[name] for name in self._pending)
        while self._names and (not waiting or waiting + self._bytes[self._names[0]] <= self._most):
            name = self._names.popleft()
            self._pending[name] = self._pool.submit(read, self._weights, name, self._device, self._dtype)
            waiting += self._bytes[name]

    def load(self, name: str) -> Tensor:
        """Return a weight on the device, in its precision."""
        future = self._pending.pop(name, None)
        if future is None and name in self._names:  # asked for before its turn
            self._names.remove(name)
        self._used += self._bytes[name]
        if self._used > _AHEAD:
            self._used = 0
            give_back()
        self._read_on()
        return future.result() if future is not None else read(self._weights, name, self._device, self._dtype)


def read(weights: Weights, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a weight on a device, in a precision, or float32 where it must be."""
    with torch.no_grad():  # of which each thread has its own; graphs can't be made with tensors of inference mode
        tensor = weights.load(name)
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{name} is stored as {kind}, as of a quantized checkpoint, which can't be read")
        return tensor.to(device, torch.float32 if weights.spec.keeps_precision(name) else dtype)


def give_back() -> None:
    """Give freed memory back to the system: glibc would keep the holes between the matrices that stay."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
