"""Codes, scales and zero points of a matrix, and how com.microsoft's MatMulNBits has them lie in memory."""

__all__ = ["Packed", "pack_codes", "pack_zeros"]

from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 1 << 18  # numbers dequantized at a time, so that they stay in the caches


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix [out, in] in blocks of consecutive inputs: a weight is about (code - zero) * scale.

    Attributes:
        codes: uint8 [out, in_padded], one a byte; in_padded is the next multiple of the block, filled with zero points.
        scales: float32 [out, blocks]; a symmetric one may be negative, so that the largest weight has the lowest code.
        zeros: uint8 [out, blocks]; None for 2**(bits - 1).
        bits: of a code, 4 or 8.
        columns: in, without padding.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    columns: int

    @property
    def block(self) -> int:
        """Inputs in a block."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Tensor:
        """Return what the codes stand for, float32 [out, in]."""
        rows, padded = self.codes.shape
        result = torch.empty(rows, self.columns)
        step = max(1, _PIECE // padded)
        for first in range(0, rows, step):
            piece = slice(first, first + step)
            numbers = self.codes[piece].float().view(-1, self.scales.shape[1], self.block)
            numbers -= 1 << (self.bits - 1) if self.zeros is None else self.zeros[piece, :, None].float()
            numbers *= self.scales[piece, :, None]
            result[piece] = numbers.flatten(1)[:, : self.columns]
        return result


def pack_codes(packed: Packed) -> Tensor:
    """Return the operator's B, uint8 [out, blocks, block * bits / 8]: of two codes of four bits the lower nibble first.

    Source: onnxruntime, docs/ContribOperators.md, com.microsoft.MatMulNBits.
    """
    codes = packed.codes.view(packed.codes.shape[0], packed.scales.shape[1], packed.block)
    return codes if packed.bits == 8 else _nibbles(codes)


def pack_zeros(packed: Packed) -> Tensor | None:
    """Return the operator's zero points, uint8 [out, ceil(blocks * bits / 8)], or None where they are its default.

    Of an odd number of nibbles in a row the last one is followed by a nibble of 0. Source: as of `pack_codes`.
    """
    if packed.zeros is None or packed.bits == 8:
        return packed.zeros
    return _nibbles(torch.nn.functional.pad(packed.zeros, (0, packed.zeros.shape[1] % 2)))


def _nibbles(numbers: Tensor) -> Tensor:
    """Put two numbers below 16 into a byte, along the last axis, whose length is even."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)
