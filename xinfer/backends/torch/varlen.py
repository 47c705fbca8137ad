"""Attention to a cache in blocks by FlashAttention, as torch has it (`torch.nn.attention.varlen`)."""

__all__ = ["attend_varlen", "key_starts"]

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from xinfer.backends.torch.attention import split
from xinfer.models.spec import AttentionSpec


def key_starts(block_tables: Tensor, block_size: int) -> Tensor:
    """Return int32 [S + 1] where the keys of each sequence [S, M] begin, if all M blocks are counted."""
    sequences, most = block_tables.shape
    return torch.arange(sequences + 1, dtype=torch.int32, device=block_tables.device) * (most * block_size)


def attend_varlen(
    q: Tensor,
    pool: Tensor,
    query_starts: Tensor,
    starts_of_keys: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    most_new: int,
    longest: int,
    spec: AttentionSpec,
    sinks: Tensor | None,
    block_size: int,
) -> Tensor:
    """Return [T, Q * V], from queries [T, Q, D]; see `PagedStep` for the rest.

    `most_new` is of one sequence, and `longest` the longest context or more.
    """
    k, v = (each.transpose(1, 2) for each in split(pool.view(-1, block_size, pool.shape[1]), spec))
    window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
    if most_new == 1 and len(q) == len(context_lens) and spec.window is None and sinks is None:
        window = (-1, -1)  # the same for one token, and only then heads that share keys are computed together
    found = varlen_attn(
        *(q, k, v, query_starts, starts_of_keys, most_new, longest),
        return_aux=None if sinks is None else AuxRequest(lse=True),
        scale=spec.scale,
        window_size=window,
        enable_gqa=spec.heads != spec.kv_heads,
        seqused_k=context_lens,
        block_table=block_tables,
    )
    if isinstance(found, Tensor):
        return found.flatten(1)
    assert sinks is not None
    out, sums = found  # [T, Q, D], and [Q, T], whatever its documentation says
    kept = torch.sigmoid(sums - sinks.float()[:, None]).T  # sinks take part in the sum that scores are divided by
    return (out * kept[..., None].to(out.dtype)).flatten(1)
