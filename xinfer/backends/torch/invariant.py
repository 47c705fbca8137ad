"""Steps in which a token's numbers depend on that token's own sequence alone, bit for bit.

Libraries choose other kernels for other shapes, and kernels differ in the order in which they add. So here a row never
sees a shape that depends on who else is in the step, or on how a prompt was cut:

- Matrix products get at least so many rows, in multiples of so many, as make their rows independent of the number of
  rows. How many that is was found out on the model's own matrices (`find_padding`), not assumed.
- Attention reads as many keys as the token's absolute position says (`reach`), those beyond the token masked. Queries
  that reach equally far are computed together: how many, does not matter as long as their rows are a multiple of four.
"""

__all__ = [
    "InvariantStep",
    "Padding",
    "Part",
    "attention_is_invariant",
    "by_rows",
    "find_padding",
    "plan_invariant",
    "reach",
    "repeat_last",
]

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends.torch.attention import attend as attend_to
from xinfer.backends.torch.attention import slots_of, split
from xinfer.backends.torch.entries import decode_entries
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec

_ROWS = 4  # of queries times heads that share keys: kernels treat fewer, and what is left over, in another way
_SHORTEST = 64  # keys; reaches are multiples of it
_SHARED = 32_768  # elements up to which torch gives all to one thread (at::internal::GRAIN_SIZE)
_VECTORS = 64  # elements that vectorized loops take at once, at most: two vectors of 64 bytes of half precision
_FEW = 72  # rows; what is left over of larger numbers of rows is treated as of these
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 512)


class Part(NamedTuple):
    """A piece of the model that computes rows by themselves: `compute` takes [n, width] and returns [n, ...]."""

    name: str
    width: int
    compute: Callable[[Tensor], Tensor]


def reach(positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return for each position how many keys its query reads: at least its own, at most an eighth or 63 more."""
    _, exponent = np.frexp(positions.astype(np.float64) + 1)  # 2**(exponent - 1) <= position + 1
    step = np.maximum(_SHORTEST, 2.0 ** (exponent - 4)).astype(np.int64)
    return -(-(positions + 1) // step) * step


@dataclass(frozen=True, slots=True)
class Padding:
    """How many rows matrix products get: at least `least`, in multiples of `multiple`."""

    least: int = 1
    multiple: int = 1

    def __str__(self) -> str:
        if self.multiple > 1:
            return f"matrix products have rows in multiples of {self.multiple}, so that each comes out alike"
        return f"matrix products have at least {self.least} rows, so that each comes out alike"

    def rows(self, count: int) -> int:
        """Return how many rows `count` rows become."""
        return max(self.least, -(-count // self.multiple) * self.multiple)


# From the cheapest on. A single row has kernels of its own nearly everywhere, and in half precision few rows show it.
_PADDINGS = (Padding(2), Padding(2, 2), Padding(4, 4), Padding(8, 8), Padding(16, 16), Padding(32, 32))


@dataclass(frozen=True, slots=True)
class Tile:
    """P stretches of t new tokens each that reach equally far.

    Attributes:
        rows: [P * t] their places in the step.
        slots: [P * L] where the keys that they reach lie; beyond a sequence's end its last slot again.
        last: [P, t] the last key that each token sees, which is its own.
        length: L.
    """

    rows: Tensor
    slots: Tensor
    last: Tensor
    length: int
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """Return [P, 1, t * heads up to a multiple of four, L]: 0 where a key is seen, else minus infinity."""
        if (window, heads) not in self.masks:
            keys, last = torch.arange(self.length, device=self.last.device), self.last[..., None]
            seen = keys <= last
            if window is not None:
                seen &= keys > last - window
            seen = seen.repeat_interleave(heads, 1)
            missing = -seen.shape[1] % _ROWS
            seen = torch.cat([seen, seen[:, -1:].expand(-1, missing, -1)], 1)[:, None]
            self.masks[window, heads] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
        return self.masks[window, heads]


@dataclass(frozen=True, slots=True)
class InvariantStep:
    """A step's attention; see `Step` for what is not said here.

    T is padded by repeating the last of `count` tokens. Its copies must come out as it does, for they write their keys
    and values to the same place.
    """

    slots: Tensor
    sample_at: Tensor
    longest: int
    count: int
    tiles: tuple[Tile, ...]

    def attend(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Return [T, Q * V], from queries [T, Q, D]; keys and values come from the cache."""
        out = torch.empty(len(q), spec.heads, spec.value_dim, dtype=q.dtype, device=q.device)
        for tile in self.tiles:
            out[tile.rows] = self._attend(q[tile.rows], pool, spec, sinks, tile)
        out[self.count :] = out[self.count - 1]
        return out.flatten(1)

    def _attend(self, q: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None, tile: Tile) -> Tensor:
        stretches, count = tile.last.shape
        groups, dim = spec.kv_heads, spec.head_dim
        heads = spec.heads // groups
        entries = decode_entries(pool.index_select(0, tile.slots), spec, q.dtype)
        k, v = split(entries.view(stretches, tile.length, -1), spec)
        queries = q.view(stretches, count, groups, heads, dim).transpose(1, 2).reshape(stretches, groups, -1, dim)
        missing = -(count * heads) % _ROWS
        padded = F.pad(queries, (0, 0, 0, missing))
        mask = tile.mask(spec.window, heads, q.dtype)
        if sinks is not None:
            sinks = F.pad(sinks.view(groups, heads).repeat(1, count), (0, missing))
        result = attend(padded, k, v, spec, mask, sinks)
        result = result[:, :, : count * heads].view(stretches, groups, count, heads, -1)
        return result.transpose(1, 2).reshape(stretches * count, spec.heads, -1)


def plan_invariant(batch: Batch, block_size: int, padding: Padding, device: torch.device) -> InvariantStep:
    """Turn a batch into what the layers need, for tokens padded by repeating the last one."""

    def send(array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

    stretches: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (tokens, reach): (sequence, first row)
    lengths = reach(batch.positions)
    owners = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    cuts = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(owners) != 0)) + 1
    edges = [0, *cuts.tolist(), len(lengths)]
    for first, end in pairwise(edges):
        stretches.setdefault((end - first, int(lengths[first])), []).append((int(owners[first]), first))
    tiles = []
    for (count, length), places in stretches.items():
        sequences, firsts = np.array(places).T
        rows = firsts[:, None] + np.arange(count)
        inside = np.minimum(np.arange(length), batch.context_lens[sequences][:, None] - 1)
        slots = slots_of(batch.block_tables[sequences], inside, block_size)
        tiles.append(Tile(send(rows.reshape(-1)), send(slots.reshape(-1)), send(batch.positions[rows]), length))
    return InvariantStep(
        slots=send(repeat_last(batch.slot_mapping, padding)),
        sample_at=send(repeat_last(batch.sample_at, padding)),
        longest=int(batch.context_lens.max()),
        count=len(batch.token_ids),
        tiles=tuple(tiles),
    )


def repeat_last(values: NDArray[np.integer], padding: Padding) -> NDArray[np.integer]:
    """Return the values with the last one repeated until there are enough."""
    return np.pad(values, (0, padding.rows(len(values)) - len(values)), "edge") if len(values) else values


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention [P, G, M, V] of queries [P, G, M, D] to keys [P, G, L, D] and values [P, G, L, V].

    A single pair of stretch and head is computed twice: torch would have its products shared out among threads, instead
    of giving each pair to one thread, and that shows in the last digit.
    """
    alone = q.shape[0] * q.shape[1] == 1
    if alone:
        q, k, v, mask = (x.expand(2, -1, -1, -1) for x in (q, k, v, mask))
    out = attend_to(q, k, v, spec, mask, sinks, by_rows)
    return out[:1] if alone else out


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) of x [..., N], elementwise, every row alike.

    What is left over at the end of a thread's share is computed without vectors, and differs in the last digit. So on a
    CPU rows are taken as many at a time as fill whole vectors, but too few for torch to share them out among threads;
    where no such number of rows is small enough, one by one.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    unit = _VECTORS // math.gcd(_VECTORS, flat.shape[1])
    rows = _SHARED // flat.shape[1] // unit * unit or 1
    missing = -len(flat) % unit if rows > 1 else 0
    padded = F.pad(flat, (0, 0, 0, missing)) if missing else flat
    pieces = [function(padded[start : start + rows]) for start in range(0, len(padded), rows)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[: len(flat)].view(x.shape)


def find_padding(parts: Iterable[tuple[Part, int]], dtype: torch.dtype, device: torch.device) -> Padding | None:
    """Return the least padding with which every row of every part comes out the same in any number of rows.

    Tried on random rows, which are compared with the same rows among as many as the second number of each pair says;
    None if no padding does.
    """
    probes = [_Probe(part, most, dtype, device) for part, most in parts]
    return next((padding for padding in _PADDINGS if all(probe.agrees_with(padding) for probe in probes)), None)


class _Probe:
    """One part of the model, and what it makes of many rows at once.

    In float32 a row that is added up in another order differs nearly always. In half precision most differences vanish
    in rounding: 8 of 80 single rows differed in SmolLM2's MLP, at least one of two where matrices are eight times as
    large. So there each number of rows is tried many times.
    """

    def __init__(self, part: Part, most: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the program's own generators stay as they are
        self._x = torch.randn(most, part.width, generator=generator).to(device, dtype)
        self._compute, self._whole = part.compute, part.compute(self._x)
        self._tries = 3 if dtype == torch.float32 else _tries(part.width * self._whole.shape[1])
        self._known: dict[int, bool] = {}

    def agrees_with(self, padding: Padding) -> bool:
        """Whether rows come out the same however many there are, padded so."""
        most = len(self._x)
        return all(self._agrees(min(padding.rows(count), most)) for count in _COUNTS if count <= most)

    def _agrees(self, count: int) -> bool:
        """Whether `count` rows, from many places, come out as among all."""
        if count not in self._known:
            tries = self._tries if count <= _FEW else max(3, self._tries // 8)
            places = np.linspace(0, len(self._x) - count, tries).astype(int)
            self._known[count] = all(
                torch.equal(self._compute(self._x[s : s + count].clone()), self._whole[s : s + count])
                for s in np.unique(places).tolist()
            )
        return self._known[count]


def _tries(size: int) -> int:
    """Return how often rows are tried that a matrix of this size makes; the larger, the more rows would differ."""
    return min(128, max(3, (128 << 20) // size))


def attention_is_invariant(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a query's result depends neither on how many others are computed with it nor on other sequences."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    sinks = random(spec.kv_heads, 2 * _SHORTEST) if spec.sinks else None
    for length in (_SHORTEST, 5 * _SHORTEST, 16 * _SHORTEST, 36 * _SHORTEST):
        q = random(3, spec.kv_heads, 2 * _SHORTEST, spec.head_dim)
        k, v = split(random(3, length, spec.cache_width), spec)
        last = torch.randint(length - _SHORTEST, length, (q.shape[2], 1), generator=generator).to(device)
        hidden = torch.arange(length, device=device) > last
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)

        def part(which: slice, rows: slice, q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor = mask) -> Tensor:
            here = mask[None, None, rows].expand(len(q[which]), -1, -1, -1)
            own = None if sinks is None else sinks[:, rows]
            return attend(q[which, :, rows].contiguous(), k[which], v[which], spec, here, own)

        whole = part(slice(None), slice(None))
        for count in (_ROWS, 2 * _ROWS, 3 * _ROWS, 8 * _ROWS, 9 * _ROWS, 11 * _ROWS, 17 * _ROWS):
            for start in range(0, q.shape[2] - count + 1, count):
                rows = slice(start, start + count)
                if not all(torch.equal(part(slice(i, i + 1), rows), whole[i : i + 1, :, rows]) for i in range(3)):
                    return False
    return True
