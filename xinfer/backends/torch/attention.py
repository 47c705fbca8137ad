"""Attention over a cache in blocks, for any mix of prefill and decode.

A layer's cache ("pool") is one tensor [slots, cache_width]: a slot holds a token's keys, then its values, unless these
are part of the keys; `entries.py` tells how they are kept as codes. Sequences with one new token are computed together,
padded to the longest; each of the others alone.
"""

__all__ = ["CpuStep", "Step", "attend", "plan_step", "slots_of", "split"]

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends.torch.entries import as_kept, decode_entries
from xinfer.backends.torch.kernels import available
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec

Slots = Tensor | slice  # of a pool: indices, or a stretch
Elementwise = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

_SCORES = 1 << 24  # of attention that torch has no kernel for, so many are held at once


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

    def attend(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Return [T, Q * V], from queries [T, Q, D] and what the step's own tokens have in the cache [T, cache_width].

        `sinks` [Q] are scores besides; V is the width of a value.
        """
        if self.decode is not None and self.decode.rows is None:
            return self._decode(q, pool, spec, sinks, self.decode)
        out = torch.empty(len(q), spec.heads * spec.value_dim, dtype=q.dtype, device=q.device)
        for prefill in self.prefills:
            out[prefill.start : prefill.end] = self._prefill(q, kv, pool, spec, sinks, prefill)
        if self.decode is not None and self.decode.rows is not None:
            rows = q.index_select(0, self.decode.rows)
            out.index_copy_(0, self.decode.rows, self._decode(rows, pool, spec, sinks, self.decode))
        return out

    def _decode(self, q: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None, decode: Decode) -> Tensor:
        """All heads that share keys are taken as queries of one head: nothing is repeated for them."""
        rows, groups = len(decode.context), spec.kv_heads
        k, v = split(_read(pool, decode.slots, spec, q.dtype).view(rows, decode.length, -1), spec)
        grouped = q.reshape(rows, groups, -1, spec.head_dim)  # [S, G, Q / G, D]
        sinks = None if sinks is None else sinks.view(groups, -1)
        return attend(grouped, k, v, spec, decode.mask(spec.window), sinks).reshape(rows, -1)

    def _prefill(
        self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None, part: Prefill
    ) -> Tensor:
        length, new = part.end - part.start, slice(part.start, part.end)
        seen = as_kept(kv[new], pool, spec) if part.slots is None else _read(pool, part.slots, spec, q.dtype)
        k, v = split(seen[None], spec)
        queries = q[new].transpose(0, 1)[None]  # [1, Q, length, D]
        causal = length == part.context and (spec.window is None or spec.window >= length)
        mask = None if causal and is_plain(spec) else _causal(length, part.context, spec.window, q.device)
        sinks = None if sinks is None else sinks[:, None]
        out = attend(queries, k, v, spec, mask, sinks, causal=mask is None)
        return out[0].transpose(0, 1).reshape(length, -1)


@dataclass(frozen=True, slots=True)
class CpuStep:
    """As `Step`, for the operator that sees to all sequences at once.

    Attributes:
        slots: [T] where keys and values are written.
        sample_at: [K] tokens whose logits are wanted; None for all.
        longest: tokens of the longest sequence.
        query_starts: int32 [S + 1] where each sequence's new tokens begin in the step, and where the last ones end.
        context_lens: int32 [S] tokens of each sequence, new ones among them.
        block_tables: int32 [S, M].
        block_size: slots of a block.
    """

    slots: Tensor
    sample_at: Tensor | None
    longest: int
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    block_size: int

    def attend(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """See `Step.attend`; keys and values are read from the pool alone."""
        latent = spec.latent is not None
        cap, window = spec.softcap or 0.0, spec.window or 0
        out: Tensor = torch.ops.xinfer.attention(
            *(q, pool, self.query_starts, self.context_lens, self.block_tables, sinks, self.block_size),
            *(spec.kv_heads, spec.value_dim, latent, spec.scale, cap, window),
        )
        return out


def split(entries: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return keys [S, G, L, D] and values [S, G, L, V] of cache entries [S, L, cache_width]; views."""
    width, shape = spec.kv_heads * spec.head_dim, (*entries.shape[:2], spec.kv_heads)
    k = entries[..., :width].view(*shape, spec.head_dim).transpose(1, 2)
    if spec.latent is not None:
        return k, k[..., : spec.value_dim]
    return k, entries[..., width:].view(*shape, spec.head_dim).transpose(1, 2)


def is_plain(spec: AttentionSpec) -> bool:
    """Whether torch has a kernel for this attention."""
    return spec.softcap is None and not spec.sinks


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    sinks: Tensor | None,
    elementwise: Elementwise = lambda function, x: function(x),
    *,
    causal: bool = False,
) -> Tensor:
    """Return attention [B, N, M, V] of queries [B, N, M, D] to keys [B, G, L, D] and values [B, G, L, V].

    N / G heads share keys. `mask`, broadcast to [B, 1, M, L], is true or 0 where a key is seen; `sinks`, to [N, M], are
    scores of keys without a value; `causal` instead of a mask where M is L and torch has a kernel.
    """
    shared = q.shape[1] != k.shape[1]
    if is_plain(spec):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=shared
        )
    groups, queries, keys = k.shape[1], q.shape[2], k.shape[2]
    q, k, v = (
        q.reshape(len(q), groups, -1, queries, spec.head_dim),
        k[:, :, None],
        v[:, :, None],
    )  # [B, G, N / G, M, D], [B, G, 1, L, ...]
    if mask is not None:
        mask = mask.view(-1, 1, 1, *mask.shape[-2:]).expand(-1, -1, -1, queries, keys)
    if sinks is not None:
        sinks = sinks.float().view(groups, -1, sinks.shape[1], 1).expand(-1, -1, queries, -1)
    rows = max(4, _SCORES // (len(q) * q.shape[1] * q.shape[2] * keys) // 4 * 4)
    outs = []
    for start in range(0, queries, rows):
        at = slice(start, start + rows)
        weights = _weights(q[..., at, :] @ k.mT, spec, _rows(mask, at), _rows(sinks, at), elementwise)
        outs.append(weights.to(v.dtype) @ v)
    return torch.cat(outs, -2).flatten(1, 2)


def _rows(x: Tensor | None, at: slice) -> Tensor | None:
    return None if x is None else x[..., at, :]


def _weights(
    products: Tensor, spec: AttentionSpec, mask: Tensor | None, sinks: Tensor | None, elementwise: Elementwise
) -> Tensor:
    """Return the softmax of scores [..., M, L], in float32, capped, with a sink's share left out."""
    scores = products.float() * spec.scale
    if spec.softcap is not None:
        scores = elementwise(torch.tanh, scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def _read(pool: Tensor, slots: Slots, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """Return keys and values of these slots: a view where they lie side by side as they are, else a copy."""
    entries = pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)
    return decode_entries(entries, spec, dtype)


def _causal(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, context], true where a key is seen by a query; the last query is the last key's."""
    last = torch.arange(context - length, context, device=device)[:, None]
    keys = torch.arange(context, device=device)
    seen = keys <= last
    return seen & (keys > last - window) if window is not None else seen


def plan_step(batch: Batch, block_size: int, device: torch.device) -> Step | CpuStep:
    """Turn a batch into what the layers need, once for all of them."""
    if device.type == "cpu" and available():
        return _plan_for_cpu(batch, block_size)
    return _plan_for_torch(batch, block_size, device)


def _plan_for_torch(batch: Batch, block_size: int, device: torch.device) -> Step:
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


def _plan_for_cpu(batch: Batch, block_size: int) -> CpuStep:
    everything = len(batch.sample_at) == len(batch.token_ids)
    return CpuStep(
        slots=torch.from_numpy(batch.slot_mapping),
        sample_at=None if everything else torch.from_numpy(batch.sample_at),
        longest=int(batch.context_lens.max()),
        query_starts=torch.from_numpy(batch.query_starts),
        context_lens=torch.from_numpy(batch.context_lens),
        block_tables=torch.from_numpy(np.ascontiguousarray(batch.block_tables)),
        block_size=block_size,
    )


def slots_of(table: NDArray[np.int32], places: NDArray[np.integer], block_size: int) -> NDArray[np.int64]:
    """Return the slots of places in a sequence; table [M] with places [L], or [S, M] with [S, L]."""
    blocks = np.take_along_axis(table, places // block_size, -1).astype(np.int64)
    return blocks * block_size + places % block_size
