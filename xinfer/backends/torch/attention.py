"""Attention over a cache in blocks, for any mix of prefill and decode.

A layer's cache ("pool") is one tensor [slots, 2 * G * D]: a slot holds a token's keys, then its values. Sequences with
one new token are computed together, padded to the longest; each of the others alone.
"""

__all__ = ["Step", "plan_step"]

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec

Slots = Tensor | slice  # of a pool: indices, or a stretch


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence with several new tokens, `start` up to `end` of the step, at the end of `context` tokens.

    `slots` says where they lie; it is None where all are new, so that nothing need be read back.
    """

    start: int
    end: int
    context: int
    slots: Slots | None


@dataclass(frozen=True, slots=True)
class Decode:
    """S sequences with one new token each.

    Attributes:
        rows: [S] their places in the step, or None where the step has no others.
        slots: S * L places where their tokens lie. Those beyond a sequence's end repeat its last slot, so that whatever
            an unused slot holds is never read: a weight of zero times NaN would be NaN.
        context: [S] tokens of each.
        length: L.
        ragged: whether the contexts differ.
    """

    rows: Tensor | None
    slots: Slots
    context: Tensor
    length: int
    ragged: bool
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """Return [S, 1, 1, L], true where a key is seen, or None where all are; the same for all layers alike."""
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        width = self.length if window is None else min(window, self.length)
        if not self.ragged and width == self.length:
            return None
        keys, last = torch.arange(self.length, device=self.context.device), self.context[:, None]
        return ((keys < last) & (keys >= last - width))[:, None, None]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's attention: where new tokens go, and which tokens each of them sees.

    Attributes:
        slots: [T] where keys and values are written.
        sample_at: [K] tokens whose logits are wanted; None for all.
        longest: tokens of the longest sequence.
    """

    slots: Tensor
    sample_at: Tensor | None
    longest: int
    decode: Decode | None
    prefills: tuple[Prefill, ...]

    def attend(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec) -> Tensor:
        """Return [T, Q * D], from queries [T, Q, D] and the step's own keys and values [T, 2 * G, D]."""
        if self.decode is not None and self.decode.rows is None:
            return self._decode(q, pool, spec, self.decode)
        out = torch.empty_like(q).flatten(1)
        for prefill in self.prefills:
            out[prefill.start : prefill.end] = self._prefill(q, kv, pool, spec, prefill)
        if self.decode is not None and self.decode.rows is not None:
            rows = q.index_select(0, self.decode.rows)
            out.index_copy_(0, self.decode.rows, self._decode(rows, pool, spec, self.decode))
        return out

    def _decode(self, q: Tensor, pool: Tensor, spec: AttentionSpec, decode: Decode) -> Tensor:
        """All heads that share keys are taken as queries of one head: nothing is repeated for them."""
        rows, heads, dim = len(decode.context), spec.kv_heads, spec.head_dim
        kv = _read(pool, decode.slots).view(rows, decode.length, 2, heads, dim)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [S, G, L, D]
        grouped = q.reshape(rows, heads, -1, dim)  # [S, G, Q / G, D]
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=decode.mask(spec.window), scale=spec.scale)
        return out.reshape(rows, -1)

    def _prefill(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, part: Prefill) -> Tensor:
        length, heads, dim = part.end - part.start, spec.kv_heads, spec.head_dim
        seen = kv[part.start : part.end] if part.slots is None else _read(pool, part.slots)
        k, v = seen.view(part.context, 2, heads, dim).permute(1, 2, 0, 3)[:, None]  # [1, G, context, D]
        queries = q[part.start : part.end].transpose(0, 1)[None]  # [1, Q, length, D]
        whole = length == part.context and (spec.window is None or spec.window >= length)
        out = F.scaled_dot_product_attention(
            queries,
            k,
            v,
            attn_mask=None if whole else _causal(length, part.context, spec.window, q.device),
            is_causal=whole,
            scale=spec.scale,
            enable_gqa=heads != spec.heads,
        )
        return out[0].transpose(0, 1).reshape(length, -1)


def _read(pool: Tensor, slots: Slots) -> Tensor:
    """Return keys and values of these slots: a view where they lie side by side, else a copy."""
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def _causal(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, context], true where a key is seen by a query; the last query is the last key's."""
    last = torch.arange(context - length, context, device=device)[:, None]
    keys = torch.arange(context, device=device)
    seen = keys <= last
    return seen & (keys > last - window) if window is not None else seen


def plan_step(batch: Batch, block_size: int, device: torch.device) -> Step:
    """Turn a batch into what the layers need, once for all of them."""

    def send(array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array).to(device, torch.int64)

    def place(slots: NDArray[np.int64]) -> Slots:
        beside = slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all())
        return slice(int(slots[0]), int(slots[-1]) + 1) if beside else send(slots)

    starts, lengths = batch.query_starts[:-1], np.diff(batch.query_starts)
    single = np.flatnonzero(lengths == 1)
    prefills = []
    for s in np.flatnonzero(lengths != 1).tolist():
        context, length = int(batch.context_lens[s]), int(lengths[s])
        slots = None
        if context != length:
            slots = place(slots_of(batch.block_tables[s], np.arange(context), block_size))
        prefills.append(Prefill(int(starts[s]), int(starts[s]) + length, context, slots))
    decode = None
    if len(single):
        contexts = batch.context_lens[single]
        longest = int(contexts.max())
        places = np.minimum(np.arange(longest), contexts[:, None] - 1)
        slots = place(slots_of(batch.block_tables[single], places, block_size).reshape(-1))
        rows = send(starts[single]) if prefills else None
        decode = Decode(rows, slots, send(contexts), longest, bool((contexts != longest).any()))
    everything = len(batch.sample_at) == len(batch.token_ids)
    sample_at = None if everything else send(batch.sample_at)
    longest = int(batch.context_lens.max())
    return Step(send(batch.slot_mapping), sample_at, longest, decode, tuple(prefills))


def slots_of(table: NDArray[np.int32], places: NDArray[np.integer], block_size: int) -> NDArray[np.int64]:
    """Return the slots of places in a sequence; table [M] with places [L], or [S, M] with [S, L]."""
    blocks = np.take_along_axis(table, places // block_size, -1).astype(np.int64)
    return blocks * block_size + places % block_size
