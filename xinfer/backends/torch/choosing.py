"""Which kernel computes a kind of attention on a device, and why not a better one."""

__all__ = ["Choice", "choose_kernel"]

from dataclasses import dataclass

import torch

from xinfer.backends.torch.kernels import available
from xinfer.backends.torch.paged import Kernel
from xinfer.models.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, and what was against each of those that are better."""

    kernel: Kernel
    reasons: tuple[str, ...] = ()


def choose_kernel(spec: AttentionSpec, device: torch.device) -> Choice:
    """Return what computes this kind of attention on a device."""
    if device.type == "cpu" and available():
        return Choice("cpp")
    return Choice("sdpa")
