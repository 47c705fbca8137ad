"""Rotary positions: the turn of each position, computed once and looked up."""

__all__ = ["Rotary", "Turn", "grow", "rotate", "rotate_and_store"]

from typing import NamedTuple

import torch
from torch import Tensor

from xinfer.models.spec import RopeSpec

_PIECE = 1024  # positions computed at once; always the same ones together, so that a position's turn is always the same


class Turn(NamedTuple):
    """Cosine and signed sine [T, 1, D] of T positions; of each pair the first dimension's sine is negative.

    `growth` [T, 1, 1] is a factor on queries besides, if there is one.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    growth: Tensor | None = None


class Rotary:
    """Cosine and sine of every position up to the longest sequence so far, for sequences of at most `max_len`."""

    def __init__(self, spec: RopeSpec, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self._frequencies = torch.from_numpy(spec.inverse_frequencies(max_len)).to(device)
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, 1, 2 * len(self._frequencies), dtype=dtype, device=device)

    def at(self, positions: Tensor, longest: int) -> Turn:
        """Return the turn of positions [T] below `longest`."""
        while len(self._cos) < longest:
            cos, sin = self._piece(len(self._cos))
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return Turn(cos, sin, self.spec.interleaved, self._growth(positions))

    def _growth(self, positions: Tensor) -> Tensor | None:
        if not self.spec.query_growth:
            return None
        contexts = positions // self.spec.original_max_len
        return (1 + self.spec.query_growth * (1 + contexts).log()).to(self._dtype)[:, None, None]

    def _piece(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _PIECE, device=self._frequencies.device)
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self.spec.amplitude, angles.sin() * self.spec.amplitude
        pairs = ([cos, cos], [-sin, sin])
        if self.spec.interleaved:
            both = [torch.stack(pair, -1).flatten(1) for pair in pairs]
        else:
            both = [torch.cat(pair, 1) for pair in pairs]
        cos, sin = (values[:, None].to(self._dtype) for values in both)
        return cos, sin


def rotate(x: Tensor, turn: Turn | None) -> Tensor:
    """Turn the first D of a head's dimensions, x [T, heads, D or more]; None leaves it as it is."""
    if turn is None:
        return x
    width = turn.cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], turn), x[..., width:]], -1)
    other = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2) if turn.interleaved else x.roll(width // 2, -1)
    return torch.addcmul(x * turn.cos, other, turn.sin)


def rotate_and_store(qkv: Tensor, turn: Turn, slots: Tensor, pool: Tensor, kv_heads: int) -> Tensor:
    """Return turned queries [T, Q, D] of projections [T, Q + 2 G, D]; turned keys, and values, go to `slots` of `pool`.

    On a CPU for which there are operators, and with a pool of numbers.
    """
    queries: Tensor = torch.ops.xinfer.rotate_and_store(
        qkv, turn.cos, turn.sin, slots, pool, kv_heads, turn.interleaved
    )
    return grow(queries, turn)


def grow(queries: Tensor, turn: Turn | None) -> Tensor:
    """Multiply queries [T, heads, D] by the factor that their positions have, if there is one."""
    return queries if turn is None or turn.growth is None else queries * turn.growth
