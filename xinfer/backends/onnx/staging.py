"""A step's arrays on their way to the device: one buffer here, one there, and one copy."""

__all__ = ["Staging"]

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xinfer.engine.types import Batch

_ALIGNED = 256  # bytes, as CUDA's own allocations are


class Staging:
    """Holds inputs of the graph at fixed addresses, each with room for the largest step.

    Args:
        tokens, sequences, rows: of the largest step; rows are those of logits.
        width: blocks of the longest sequence.
        device: where the graph reads.

    Attributes:
        places: of each input its address on the device.
    """

    def __init__(self, tokens: int, sequences: int, rows: int, width: int, device: torch.device) -> None:
        self._width = width
        sizes = {
            "position_ids": 8 * tokens,
            "input_ids": 4 * tokens,
            "slot_mapping": 4 * tokens,
            "cumulative_sequence_length": 4 * (sequences + 1),
            "past_seqlens": 4 * sequences,
            "sample_at": 4 * rows,
            "block_table": 4 * sequences * width,
        }
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes.values()), initial=0))
        self._host = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._table = starts[-2]
        self._arrays: dict[str, NDArray[np.integer]] = {}
        self.places: dict[str, int] = {}
        for (name, size), start in zip(sizes.items(), starts, strict=False):
            kind = np.int64 if self.dtype(name) == torch.int64 else np.int32
            self._arrays[name] = self._host[start : start + size].numpy().view(kind)
            self.places[name] = self._device.data_ptr() + start

    @staticmethod
    def dtype(name: str) -> torch.dtype:
        """Return an input's type."""
        return torch.int64 if name == "position_ids" else torch.int32

    def shape(self, name: str, tokens: int, sequences: int, rows: int) -> tuple[int, ...]:
        """Return an input's shape in a step of so many tokens, sequences and rows of logits."""
        shapes: dict[str, tuple[int, ...]] = {
            "position_ids": (1, tokens),
            "input_ids": (1, tokens),
            "slot_mapping": (tokens,),
            "cumulative_sequence_length": (sequences + 1,),
            "past_seqlens": (sequences,),
            "sample_at": (rows,),
            "block_table": (sequences, self._width),
        }
        return shapes[name]

    def send(self, batch: Batch, padded: int) -> None:
        """Copy a step's arrays to the device, on the current stream.

        Up to `padded` sequences further ones are added, of one token each, which is written nowhere and sees one slot.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy reads the same memory
        tokens, sequences = len(batch.token_ids), len(batch.context_lens)
        more = padded - sequences
        starts = batch.query_starts
        self._put("input_ids", batch.token_ids, more, 0)
        self._put("position_ids", batch.positions, more, 0)
        self._put("slot_mapping", batch.slot_mapping, more, -1)
        self._put("past_seqlens", batch.context_lens - np.diff(starts), more, 0)
        self._put("cumulative_sequence_length", starts, more, np.arange(tokens + 1, tokens + more + 1))
        self._arrays["sample_at"][0] = 0  # stays where no logits are wanted
        self._put("sample_at", batch.sample_at, more, np.arange(tokens, tokens + more))
        end = padded * self._width
        table = self._arrays["block_table"][:end].reshape(padded, self._width)
        table[:sequences, : batch.block_tables.shape[1]] = batch.block_tables
        table[sequences:, 0] = 0
        self._device[: self._table + 4 * end].copy_(self._host[: self._table + 4 * end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _put(self, name: str, values: NDArray[np.integer], more: int, filling: int | NDArray[np.integer]) -> None:
        array, count = self._arrays[name], len(values)
        array[:count] = values
        array[count : count + more] = filling
