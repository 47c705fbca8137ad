"""Tensors over memory that others hold."""

__all__ = ["lent"]

import torch
from torch import Tensor


def lent(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory, on any device, that does not hold it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = extent * tensor.element_size()
    memory = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, tensor.shape, tensor.stride())
