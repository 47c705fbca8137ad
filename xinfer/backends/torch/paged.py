"""Attention to a cache in blocks as one operator, for any mix of prefill and decode.

A graph that is exported ahead of time holds the operator as it is: whatever depends on the step's shapes is decided
inside it, by a few numbers that the step has on the host besides.
"""

__all__ = [
    "Kernel",
    "Kernels",
    "PagedStep",
    "begun_blocks",
    "host_numbers",
    "paged_attention",
    "plan_paged",
    "plan_step",
]

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, library

from xinfer.backends.torch.attention import Step, gathered, plan_gathered
from xinfer.backends.torch.flex import attend_flex, tile_tokens, tiles
from xinfer.backends.torch.varlen import attend_varlen, key_starts
from xinfer.engine.transfer import send_together
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec, LatentSpec, NormSpec

Kernel = Literal["cpp", "varlen", "flex", "sdpa"]
Kernels = Mapping[AttentionSpec, Kernel]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """As `Step`, for kernels that see to all sequences at once.

    Attributes:
        slots: [T] where keys and values are written.
        sample_at: [K] tokens whose logits are wanted; None for all.
        longest: tokens of the longest sequence.
        query_starts: int32 [S + 1] where each sequence's new tokens begin in the step, and where the last ones end.
        context_lens: int32 [S] tokens of each sequence, new ones among them.
        block_tables: int32 [S, M].
        block_size: slots of a block.
        host: see `host_numbers`.
        single: whether it is known that each sequence has one new token.
        kernels: what computes each kind of attention.
        made: what kernels made of the above, for all layers that are alike in what it is made for.
    """

    slots: Tensor
    sample_at: Tensor | None
    longest: int
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    block_size: int
    host: Tensor
    single: bool
    kernels: Kernels
    made: dict[tuple[Hashable, ...], list[Tensor]] = field(default_factory=dict)

    def turns(self, spec: AttentionSpec, pool: Tensor, x: Tensor) -> bool:
        """Whether `rotary.rotate_and_store` can be called for it, with a cache and projections of these precisions."""
        return self.kernels[spec] == "cpp" and pool.dtype == x.dtype

    def attend(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """See `Step.attend`; keys and values are read from the pool alone."""
        kernel, latent = self.kernels[spec], spec.latent is not None
        cap, window = spec.softcap or 0.0, spec.window or 0
        places = (q, pool, self.query_starts, self.context_lens, self.block_tables)
        shape = (self.block_size, spec.kv_heads, spec.value_dim, latent, spec.scale, cap, window)
        if kernel == "cpp":
            out: Tensor = torch.ops.xinfer.attention(*places, sinks, *shape)
        else:
            made = self._made(kernel, spec, q.shape[0], pool.shape[0] // self.block_size)
            out = torch.ops.xinfer.paged_attention(*places, self.host, made, sinks, kernel, *shape)
        return out

    def _made(self, kernel: Kernel, spec: AttentionSpec, tokens: int, num_blocks: int) -> list[Tensor]:
        """Return what the kernel needs besides, on the device."""
        starts, contexts, tables = self.query_starts, self.context_lens, self.block_tables
        if kernel == "varlen":
            return self._once((kernel,), lambda: [key_starts(tables, self.block_size)])
        if kernel == "flex":
            shape = (tokens, tile_tokens(spec, self.single), spec.window, self.block_size, num_blocks)
            return self._once((kernel, *shape[1:3]), lambda: tiles(starts, contexts, tables, *shape))
        return []

    def _once(self, key: tuple[Hashable, ...], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def host_numbers(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32]) -> Tensor:
    """Return int32 [2S + 3] on the host: most new tokens and tokens of a sequence, then both arrays end to end.

    Longer contexts than there are may be told where each sequence has one token, as by a graph that outlives its step.
    """
    longest = (int(np.diff(query_starts).max(initial=0)), int(context_lens.max(initial=0)))
    return torch.from_numpy(np.concatenate([np.array(longest, np.int32), query_starts, context_lens]))


def plan_step(batch: Batch, block_size: int, device: torch.device, kernels: Kernels) -> Step | PagedStep:
    """Turn a batch into what the layers need; for `sdpa` alone it is planned on the host, once for all of them."""
    if set(kernels.values()) == {"sdpa"}:
        return plan_gathered(batch, block_size, device)
    return plan_paged(batch, block_size, device, kernels)


def plan_paged(batch: Batch, block_size: int, device: torch.device, kernels: Kernels) -> PagedStep:
    """Turn a batch into what the layers need, once for all of them."""
    everything = len(batch.sample_at) == len(batch.token_ids)
    host = host_numbers(batch.query_starts, batch.context_lens)
    arrays = (batch.slot_mapping, batch.sample_at, batch.query_starts, batch.context_lens, batch.block_tables)
    slots, sample_at, query_starts, context_lens, block_tables = send_together(arrays, device)
    return PagedStep(
        slots=slots.long(),
        sample_at=None if everything else sample_at,
        longest=int(host[1]),
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        block_size=block_size,
        host=host,
        single=int(host[0]) == 1 and len(batch.token_ids) == len(batch.context_lens),
        kernels=kernels,
    )


def begun_blocks(batch: Batch, block_size: int) -> NDArray[np.int64]:
    """Return the blocks whose first token the batch brings."""
    begun: NDArray[np.int64] = batch.slot_mapping[batch.positions % block_size == 0] // block_size
    return begun


@library.custom_op("xinfer::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    pool: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    host: Tensor,
    made: list[Tensor],
    sinks: Tensor | None,
    kernel: str,
    block_size: int,
    kv_heads: int,
    value_dim: int,
    latent: bool,
    scale: float,
    softcap: float,
    window: int,
) -> Tensor:
    """Return [T, Q * V], from queries [T, Q, D] and a pool [slots, cache_width]; see `PagedStep` and `Step.attend`.

    `softcap` and `window` are 0 where there are none.
    """
    shape = (q.shape[1], q.shape[2], kv_heads, value_dim, latent)
    spec = _spec(*shape, scale, softcap, window, sinks is not None)
    if kernel == "flex":
        return attend_flex(q, pool, made, spec, sinks, block_size)
    if kernel == "varlen":
        tables = (query_starts, made[0], context_lens, block_tables)
        return attend_varlen(q, pool, *tables, int(host[0]), int(host[1]), spec, sinks, block_size)
    starts, contexts = torch.split(host[2:], [len(query_starts), len(context_lens)])
    return gathered(q, pool, starts.tolist(), contexts.tolist(), context_lens, block_tables, block_size, spec, sinks)


@paged_attention.register_fake
def _(q: Tensor, pool: Tensor, *rest: object, **named: object) -> Tensor:
    value_dim = rest[9]
    assert isinstance(value_dim, int)
    return q.new_empty(q.shape[0], q.shape[1] * value_dim)


@cache
def _spec(
    heads: int,
    dim: int,
    kv_heads: int,
    value_dim: int,
    latent: bool,
    scale: float,
    softcap: float,
    window: int,
    sinks: bool,
) -> AttentionSpec:
    """Return as much of a kind of attention as kernels look at."""
    return AttentionSpec(
        heads,
        kv_heads,
        dim,
        window=window or None,
        scaling=scale,
        softcap=softcap or None,
        sinks=sinks,
        latent=LatentSpec(value_dim, None, 0, dim - value_dim, value_dim, NormSpec(0.0)) if latent else None,
    )
