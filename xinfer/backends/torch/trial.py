"""The largest steps that there may be, tried to see what memory they take."""

__all__ = ["largest_steps", "peak_bytes"]

from collections.abc import Callable

import numpy as np
import torch

from xinfer.engine.types import Batch, Limits


def largest_steps(limits: Limits, longest: int, block_size: int) -> list[Batch]:
    """Return the steps with the most new tokens, of few long sequences, and with the most sequences of one token each.

    All of them lie in the cache's first block.
    """
    whole, rest = divmod(limits.max_num_batched_tokens, longest)
    prompts = ([longest] * whole + ([rest] if rest else []))[: limits.max_num_seqs]
    singles = np.ones(min(limits.max_num_seqs, limits.max_num_batched_tokens), int)
    return [
        _step(np.array(prompts), np.array(prompts), limits.logits_rows, block_size),
        _step(singles, singles * longest, limits.logits_rows, block_size),
    ]


def _step(counts: np.ndarray, contexts: np.ndarray, rows: int, block_size: int) -> Batch:
    """Return a step of sequences that end with `counts` new tokens each, and whose contexts are these."""
    starts = np.concatenate([[0], counts.cumsum()])
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)])
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        query_starts=starts.astype(np.int32),
        context_lens=contexts.astype(np.int32),
        block_tables=np.zeros((len(counts), -(-contexts.max() // block_size)), np.int32),
        slot_mapping=(positions % block_size).astype(np.int64),
        sample_at=np.arange(min(rows, len(positions)), dtype=np.int32),
        adapters=np.zeros(len(counts), np.int32),
    )


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return how much more of a CUDA device's memory was in use while something ran than before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return most - before
