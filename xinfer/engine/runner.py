"""What a backend is: something that turns a batch of tokens into logits and keeps their keys and values."""

__all__ = ["LEVELS", "ModelRunner", "RunnerInfo"]

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xinfer.engine.types import Batch

# What a request's tokens do not depend on: running it again, who shares its steps, how its prompt is cut, being put
# aside, and whether its beginning was found in the cache.
LEVELS = frozenset({"rerun", "batch", "chunk", "preempt", "cache"})


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner reports of itself once it is ready; capacities are measured, never wished.

    Attributes:
        vocab_size: width of a row of logits.
        max_model_len: longest sequence that one request may have.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks that there are.
        hash_size: grain, in tokens, at which prefixes can be reused.
        kv_tokens: tokens that the memory behind the blocks holds.
        device, dtype: where and in which precision it computes.
        threads: with which it computes on a CPU; 0 where it does not say.
        resident_weight_bytes: weights held in the device's memory.
        kv_cache_bytes: memory of the KV cache.
        step_read_bytes: bytes of weights that a decode step must read; 0 where it has no meaning.
        kv_token_bytes: bytes of keys and values of one token.
        stream_slots: layers that are in memory at once, where others are brought in in every step; 0 for all.
        stream_bytes: of the layers that a step brings in.
        notes: what a user may want to know of how it computes.
        levels: those of `LEVELS` that it keeps, bit for bit, with the limits that it was made with.
        capabilities: optional parts of the contract that it has: `copy`, `free`, `layers`; `ahead` says that it
            computes in the order of its calls, and takes tokens that only its device knows (`Batch.drawn`);
            `decode_differs` says that it keeps its levels only if the engine never computes single tokens beside longer
            pieces in one call, never cuts a single token off a prompt, and computes generated tokens one by one, again
            too.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    hash_size: int = 16
    kv_tokens: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    resident_weight_bytes: int = 0
    kv_cache_bytes: int = 0
    step_read_bytes: int = 0
    kv_token_bytes: int = 0
    stream_slots: int = 0
    stream_bytes: int = 0
    notes: tuple[str, ...] = ()
    levels: frozenset[str] = frozenset({"rerun"})
    capabilities: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.kv_tokens:
            object.__setattr__(self, "kv_tokens", self.num_blocks * self.block_size)


class ModelRunner(ABC):
    """All that a backend must implement. The engine calls it from one thread."""

    info: RunnerInfo

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's new tokens, keep their keys and values, and return float32 logits [K, vocab_size].

        Row k belongs to token `batch.sample_at[k]`; there may be none. The tensor is the caller's, so later calls leave
        it as it is; the batch's arrays are the engine's. May return before the device has finished; with `ahead`, the
        next call may come before anybody has waited for it.
        """

    def copy(self, source: int, target: int, tokens: int) -> None:  # noqa: B027
        """Copy the first `tokens` tokens of block `source` into block `target` (capability `copy`)."""

    def layers(self, batch: Batch) -> list[torch.Tensor]:
        """Compute a batch as `forward` does, and return what goes into the first layer and comes out of each.

        float32 [T, width] on the host, of every token of the batch (capability `layers`).
        """
        raise NotImplementedError

    def free(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Hear of blocks that nobody holds and nobody can find any more (capability `free`).

        A block that is taken for another sequence at once is not told; its first tokens are then written anew.
        """

    def metrics(self) -> Mapping[str, Any]:
        """Return what the device tells of the last step; what it does not tell is left out.

        `mem_used` in bytes, `gpu_util` from 0 to 1, `kernel_launch_latency` and `cuda_memcpy_time` in milliseconds,
        `paged_attention_ratio`: the share of attention that a kernel for paged caches did; `stream_wait_ms`: how long
        it waited for layers to be brought in.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back memory and files."""
