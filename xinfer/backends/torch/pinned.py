"""Weights on their way from the host to a CUDA device, again in every step: as many stay in pinned memory as may."""

__all__ = ["sending"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xinfer.backends.torch.codes import Codes
from xinfer.backends.torch.load import Get, is_matrix


def sending(
    get: Get, read: Get, device: torch.device, room: int, pin: Callable[[Tensor], Tensor] = Tensor.pin_memory
) -> Get:
    """Return what returns weights on a device, on their way there in the order of its current stream.

    Args:
        get: returns on the device what is no matrix, and stays there.
        read: returns matrices on the host, in the precision to compute in, or codes.
        device: where they go.
        room: bytes of pinned memory; what finds room is read only once.
        pin: returns a copy in such memory.
    """
    kept: dict[str, Tensor | Codes] = {}

    def send(name: str) -> Any:
        nonlocal room
        if not is_matrix(name):
            return get(name)
        host = kept.get(name)
        if host is None:
            host = read(name)
            if host.nbytes <= room:
                room -= host.nbytes
                host = kept[name] = host.apply(pin) if isinstance(host, Codes) else pin(host)
        return host.to(device, non_blocking=True)

    return send
