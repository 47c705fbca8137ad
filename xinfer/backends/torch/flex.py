"""Attention to a cache in blocks by torch's flex_attention, which is compiled to one kernel for each kind.

Queries are taken in tiles of one sequence's tokens, each an entry of a batch whose keys are the whole pool; of its
blocks a tile names those that it sees. Heads that share keys are rows of one tile, so that keys are read once for them.
"""

__all__ = ["MOST_NUMBERS", "attend_flex", "tile_tokens", "tiles", "warm_up"]

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from xinfer.backends.torch.attention import split
from xinfer.models.spec import AttentionSpec

MOST_NUMBERS = 2**31 - 1  # in a pool: kernels count in 32 bits
_ROWS = 128  # of a tile: its tokens times the heads that share keys
_KINDS = 64  # of attention that are compiled in one process; torch gives up after eight


def tile_tokens(spec: AttentionSpec, single: bool) -> int:
    """Return how many tokens a tile has; one where each sequence has one."""
    return 1 if single else max(1, _ROWS * spec.kv_heads // spec.heads)


def tiles(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tokens: int,
    tile: int,
    window: int | None,
    block_size: int,
    num_blocks: int,
) -> list[Tensor]:
    """Return what a step's tiles are, by arithmetic on the device alone; N of them, as many as there may be.

    T tokens are taken in tiles of t = `tile`, each of which sees `window` keys, or all before it; `num_blocks` are the
    pool's. See `PagedStep` for the rest; whoever shares a block has it at the same place.

    Returns:
        rows: [N * t] the tokens of each tile; places of none repeat some token.
        places: [T] where each token is among these.
        first, last: [N, t] the first and the last key that each sees.
        logical: [num_blocks] which of its sequence's blocks each one is.
        counts, blocks: [N], [N, M] of the blocks that some row sees in part, how many they are and which come first.
        whole_counts, whole_blocks: the same of those that all rows see.
    """
    if block_tables.shape[1] == 1:
        block_tables = F.pad(block_tables, (0, 1), value=-1)  # torch would compile a kernel for a single one
    sequences, most = block_tables.shape
    upto = partial(torch.arange, dtype=torch.int32, device=query_starts.device)
    counts = query_starts.diff()
    needed = (counts + tile - 1) // tile
    ends = needed.cumsum(0, dtype=torch.int32)
    number = upto((tokens + sequences * (tile - 1)) // tile + 1)
    owner = torch.searchsorted(ends, number, right=True).clamp(max=sequences - 1)
    offset = ((number - (ends - needed)[owner]) * tile)[:, None] + upto(tile)
    real = offset < counts[owner, None]
    rows = torch.where(real, query_starts[owner, None] + offset, 0).view(-1)
    last = torch.where(real, (context_lens - counts)[owner, None] + offset, -1)
    first = torch.zeros_like(last) if window is None else (last - window + 1).clamp(min=0)

    index = upto(tokens)
    home = torch.searchsorted(query_starts[1:], index, right=True).clamp(max=sequences - 1)
    places = (ends - needed)[home] * tile + index - query_starts[home]

    tables = block_tables.clamp(min=0)
    start = upto(most) * block_size
    held = torch.where(start < context_lens[:, None], upto(most), 0)
    logical = upto(num_blocks) * 0
    logical = logical.scatter_reduce(0, tables.reshape(-1).long(), held.view(-1), "amax")

    lowest, earliest, latest = first[:, :1], last[:, :1], last.amax(1, keepdim=True)
    seen = (start <= latest) & (start + block_size > lowest)
    whole = seen & (start + block_size - 1 <= earliest) & (start >= first.amax(1, keepdim=True))
    parts = [each for kind in (seen & ~whole, whole) for each in _listed(kind, tables[owner])]
    return [rows, places, first, last, logical, *parts]


def _listed(chosen: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row [N, M] are chosen, and the row's blocks with these first."""
    order = (~chosen).int().argsort(stable=True)
    return chosen.sum(1, dtype=torch.int32), tables.gather(1, order)


def attend_flex(
    q: Tensor, pool: Tensor, made: list[Tensor], spec: AttentionSpec, sinks: Tensor | None, block_size: int
) -> Tensor:
    """Return [T, Q * V], from queries [T, Q, D] and what `tiles` made."""
    rows, places, first, last, logical, *blocks = made
    count, tile = last.shape
    shared = spec.heads // spec.kv_heads
    grouped = q.index_select(0, rows).view(count, tile, spec.kv_heads, shared, -1)
    queries = grouped.transpose(1, 2).reshape(count, spec.kv_heads, tile * shared, -1)
    k, v = split(pool[None], spec)  # [1, G, slots, ...]
    mask = _mask(first, last, logical, blocks, shared, block_size, pool.shape[0])
    varying = (queries, first, last, mask.kv_num_blocks, mask.full_kv_num_blocks, mask.kv_indices, mask.full_kv_indices)
    for each in varying:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    for each in varying[-2:]:
        torch._dynamo.maybe_mark_dynamic(each, 3)
    options: dict[str, Any] = {"BACKEND": "TRITON"} if q.device.type == "cuda" else {}
    with torch._dynamo.config.patch(recompile_limit=_KINDS):
        out, aux = _compiled()(
            *(queries, k, v, _capped(spec.softcap), mask, spec.scale),
            kernel_options=options,
            return_aux=AuxRequest(lse=sinks is not None),
        )
    if sinks is not None:  # they take part in the sum that scores are divided by
        kept = torch.sigmoid(aux.lse.view(count, spec.kv_heads, tile, shared) - sinks.float().view(-1, 1, shared))
        out = out * kept.view(*out.shape[:3], 1).to(out.dtype)
    found = out.view(count, spec.kv_heads, tile, shared, -1).transpose(1, 2).reshape(count * tile, -1)
    result: Tensor = found.index_select(0, places)
    return result


def warm_up(spec: AttentionSpec, pool: Tensor, dtype: torch.dtype, block_size: int) -> None:
    """Have the kernels for a kind of attention compiled now, by steps in which no two sizes are the same by chance."""
    for tile in {tile_tokens(spec, single) for single in (True, False)}:
        starts = torch.arange(3, dtype=torch.int32, device=pool.device) * tile
        tables = torch.zeros(2, 5, dtype=torch.int32, device=pool.device)
        made = tiles(
            starts, starts[1:] * 0 + tile, tables, 2 * tile, tile, spec.window, block_size, len(pool) // block_size
        )
        q = torch.zeros(2 * tile, spec.heads, spec.head_dim, dtype=dtype, device=pool.device)
        attend_flex(q, pool, made, spec, q[0, :, 0] if spec.sinks else None, block_size)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


@cache
def _capped(cap: float | None) -> Callable[..., Tensor] | None:
    """Return what caps scores."""
    if cap is None:
        return None
    return lambda score, b, h, m, n: torch.tanh(score / cap) * cap


def _mask(
    first: Tensor, last: Tensor, logical: Tensor, blocks: list[Tensor], shared: int, block_size: int, slots: int
) -> BlockMask:
    """Return which of the pool's slots the rows of each tile see."""

    def sees(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        key, token = logical[n // block_size] * block_size + n % block_size, m // shared
        return (key <= last[b, token]) & (key >= first[b, token])

    rows = last.shape[1] * shared
    counts, indices, whole_counts, whole_indices = (each.view(len(each), 1, 1, *each.shape[1:]) for each in blocks)
    return BlockMask.from_kv_blocks(
        *(counts, indices, whole_counts, whole_indices),
        BLOCK_SIZE=(-(-rows // _ROWS) * _ROWS, block_size),
        mask_mod=sees,
        seq_lengths=(rows, slots),
        compute_q_blocks=False,
    )
