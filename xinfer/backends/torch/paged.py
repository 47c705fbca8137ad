"""Attention to a cache in blocks as one operator, for any mix of prefill and decode.

A graph that is exported ahead of time holds the operator as it is: whatever depends on the step's shapes is decided
inside it, by a few numbers that the step has on the host besides.
"""

__all__ = ["Kernel", "Kernels", "PagedStep", "host_numbers", "paged_attention", "plan_paged", "plan_step"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, library

from xinfer.backends.torch.attention import Step, gathered, plan_gathered
from xinfer.engine.transfer import send
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec, LatentSpec, NormSpec

Kernel = Literal["cpp", "sdpa"]
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
        masks: what kernels made of the above for all layers alike.
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
    masks: dict[tuple[Kernel, int | None], list[Tensor]] = field(default_factory=dict)

    def attend(self, q: Tensor, kv: Tensor, pool: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """See `Step.attend`."""
        kernel, latent = self.kernels[spec], spec.latent is not None
        cap, window = spec.softcap or 0.0, spec.window or 0
        places = (q, pool, self.query_starts, self.context_lens, self.block_tables)
        shape = (self.block_size, spec.kv_heads, spec.value_dim, latent, spec.scale, cap, window)
        if kernel == "cpp":
            out: Tensor = torch.ops.xinfer.attention(*places, sinks, *shape)
        else:
            out = torch.ops.xinfer.paged_attention(*places, self.host, self._masks(kernel, spec), sinks, kernel, *shape)
        return out

    def _masks(self, kernel: Kernel, spec: AttentionSpec) -> list[Tensor]:
        """Return what the kernel needs besides, which layers with the same window share."""
        return self.masks.setdefault((kernel, spec.window), [])


def host_numbers(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32]) -> Tensor:
    """Return int32 [2S + 3] on the host: most new tokens and tokens of a sequence, then both arrays end to end."""
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
    return PagedStep(
        slots=send(batch.slot_mapping, device),
        sample_at=None if everything else send(batch.sample_at, device),
        longest=int(batch.context_lens.max()),
        query_starts=send(batch.query_starts, device),
        context_lens=send(batch.context_lens, device),
        block_tables=send(np.ascontiguousarray(batch.block_tables), device),
        block_size=block_size,
        host=host,
        single=int(host[0]) == 1 and len(batch.token_ids) == len(batch.context_lens),
        kernels=kernels,
    )


@library.custom_op("xinfer::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    pool: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    host: Tensor,
    masks: list[Tensor],
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
