"""How modules get their weights."""

__all__ = ["Get", "Join", "Load", "cat", "is_matrix"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Get = Callable[[str], Any]  # by canonical name; a tensor, or `Codes` where it is quantized
Join = Callable[[Sequence[Tensor], int], Tensor]


def cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors one behind the other along a dimension; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def is_matrix(name: str) -> bool:
    """Whether a weight is what most of a layer is made of, and not a bias or a norm's."""
    return name.endswith(".weight") and "norm" not in name


@dataclass(frozen=True, slots=True)
class Load:
    """Weights by name.

    Attributes:
        get: returns one, on the device and in the precision to compute in. A matrix may be lent: whoever wants it for
            longer than it takes to make a module has it joined, alone or with others.
        join: returns tensors as one, to be kept.
        prefix: what names begin with.
        again: as `get`, for what is asked for in every step; None where that is no different.
    """

    get: Get
    join: Join = cat
    prefix: str = ""
    again: Get | None = None

    def __call__(self, name: str) -> Any:
        """Return one; see `get`."""
        return self.get(self.prefix + name)

    def within(self, prefix: str) -> "Load":
        """Return weights whose names begin with this."""
        return replace(self, prefix=self.prefix + prefix)
