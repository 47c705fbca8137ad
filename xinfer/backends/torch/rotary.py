"""Rotary positions: the turn of each position, computed once and looked up."""

__all__ = ["Rotary", "rotate"]

import torch
from torch import Tensor

from xinfer.models.spec import RopeSpec

_PIECE = 1024  # positions computed at once; always the same ones together, so that a position's turn is always the same


class Rotary:
    """Cosine and signed sine of every position up to the longest sequence so far."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = torch.from_numpy(spec.inverse_frequencies()).to(device)
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, 1, 2 * len(self._frequencies), dtype=dtype, device=device)

    def at(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, 1, D] of positions [T] below `longest`; the sine of the first half is negative."""
        while len(self._cos) < longest:
            cos, sin = self._piece(len(self._cos))
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _piece(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _PIECE, device=self._frequencies.device)
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat([cos, cos], 1)[:, None].to(self._dtype),
            torch.cat([-sin, sin], 1)[:, None].to(self._dtype),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x [T, heads, D] by its angle."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
