"""What torch's kernels for CUDA promise and demand, computed by brute force: for where there is no such device.

Anything that is asked of them beyond that fails here, as it would there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask


def varlen_contract(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn` of FlashAttention 2 with block tables; sums are [heads, tokens]."""
    assert seqused_k is not None
    assert block_table is not None
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert all(each.stride(-1) == 1 for each in (query, key, value, block_table))
    tokens, heads, dim = query.shape
    pages, page_size, groups, _ = key.shape
    assert dim % 8 == 0
    assert dim <= 256
    assert page_size % 256 == 0
    assert key.shape == value.shape == (pages, page_size, groups, dim)
    assert heads % groups == 0
    assert enable_gqa or heads == groups
    sequences = len(cu_seq_q) - 1
    for each, length in ((cu_seq_q, sequences + 1), (cu_seq_k, sequences + 1), (seqused_k, sequences)):
        assert each.dtype == torch.int32
        assert each.is_contiguous()
        assert each.shape == (length,)
    assert block_table.dtype == torch.int32
    assert len(block_table) == sequences
    assert type(max_q) is type(max_k) is int
    assert int(cu_seq_q[-1]) == tokens
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(seqused_k.max()) <= max_k
    assert bool((cu_seq_k.diff() >= seqused_k).all())
    left, right = window_size
    if max_q == 1 and left < 0 and right < 0 and heads > groups:
        assert tokens == sequences  # heads that share keys become queries of a sequence
    out, sums = torch.zeros_like(query), torch.zeros(heads, tokens)
    for s in range(sequences):
        first, end, used = int(cu_seq_q[s]), int(cu_seq_q[s + 1]), int(seqused_k[s])
        places = torch.arange(used)
        at = block_table[s].long()[places // page_size], places % page_size
        k, v = (each[at].double().repeat_interleave(heads // groups, 1) for each in (key, value))
        scores = torch.einsum("mhd,nhd->hmn", query[first:end].double(), k) * (scale or dim**-0.5)
        last = torch.arange(used - (end - first), used)[:, None]  # aligned at the bottom right
        seen = torch.ones(end - first, used, dtype=torch.bool)
        if left >= 0:
            seen &= places >= last - left
        if right >= 0:
            seen &= places <= last + right
        scores = scores.masked_fill(~seen, -math.inf)
        out[first:end] = torch.einsum("hmn,nhd->mhd", scores.softmax(2), v).to(out.dtype)
        sums[:, first:end] = scores.logsumexp(2).float()
    return out if return_aux is None else (out, sums)


def flex_contract(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask: BlockMask,
    scale: float,
    *,
    kernel_options: dict[str, Any],
    return_aux: Any,
) -> tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` as its kernel does it.

    Blocks that a tile lists are read whole, and no others; `mask_mod` is asked only about those that are listed as seen
    in part.
    """
    batch, heads, rows, _ = query.shape
    assert len(key) == len(value) == 1
    assert key.shape[1] == value.shape[1] == heads
    assert mask.seq_lengths == (rows, key.shape[2])
    q_size, size = mask.BLOCK_SIZE
    assert q_size % 128 == 0
    assert q_size >= rows
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in lists)
    assert mask.kv_indices.shape == mask.full_kv_indices.shape == (batch, 1, 1, mask.kv_indices.shape[3])
    out = torch.zeros(batch, heads, rows, value.shape[-1], dtype=query.dtype)
    sums = torch.zeros(batch, heads, rows)
    m = torch.arange(rows)[:, None]
    for b in range(batch):
        count, whole = int(mask.kv_num_blocks[b]), int(mask.full_kv_num_blocks[b])
        listed = torch.cat([mask.kv_indices[b, 0, 0, :count], mask.full_kv_indices[b, 0, 0, :whole]])
        assert len(set(listed.tolist())) == count + whole
        slots = (listed[:, None] * size + torch.arange(size)).view(-1)
        if not len(slots):
            continue
        seen = mask.mask_mod(torch.tensor(b), torch.tensor(0), m, slots)
        seen[:, count * size :] = True
        k, v = key[0][:, slots].double(), value[0][:, slots].double()
        scores = query[b].double() @ k.mT * scale
        if score_mod is not None:
            scores = score_mod(scores, None, None, None, None)
        scores = scores.masked_fill(~seen, -math.inf)
        out[b] = (scores.softmax(-1).nan_to_num(0.0) @ v).to(out.dtype)
        sums[b] = scores.logsumexp(-1).float()
    return out, AuxOutput(lse=sums if return_aux.lse else None)
