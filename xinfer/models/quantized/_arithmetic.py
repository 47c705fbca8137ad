"""What quantization schemes have in common: dense packing, and codes times scales, in pieces that fit the caches."""

__all__ = ["as_bytes", "dequantize_rows", "fp8_numbers", "group_indices", "unpack"]

from collections.abc import Callable

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantized._stored import FP8

# Numbers dequantized at a time: 1 MB of float32, which stays in a core's cache between the passes.
_PIECE = 1 << 18


def as_bytes(words: Tensor) -> Tensor:
    """Return words of 32 bits, in any layout, as bytes [rows, 4 * words], the lowest first as on every machine here."""
    # Flat first: of a transposed single row torch says that it is contiguous, and still refuses to view it.
    return words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return unsigned numbers of 2, 3, 4 or 8 bits that lie densely in bytes, the lowest bits first.

    `packed` is uint8 [rows, n], the result uint8 [rows, n * 8 / bits], rounded up. Words of 32 bits are such bytes,
    also where a number of 3 bits lies across two words.
    """
    if bits == 3:
        packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 3))
        triples = packed.reshape(packed.shape[0], -1, 3).to(torch.int32)
        words = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)  # eight numbers each
        numbers: Tensor = words[..., None] >> torch.arange(0, 24, 3, dtype=torch.int32)
        return (numbers & 7).to(torch.uint8).flatten(1)
    width = 8
    while width > bits:  # halve each number: its upper half becomes the byte after it
        width //= 2
        wide = packed.to(torch.int16)
        packed = ((wide << (8 - width)) | wide).bitwise_and_(((1 << width) - 1) * 0x0101).view(torch.uint8)
    return packed


# What each byte means; looking it up takes a fifth of torch's conversion, which is not vectorized.
_FP8 = {kind: torch.arange(256, dtype=torch.uint8).view(kind).float() for kind in FP8}


def fp8_numbers(stored: Tensor) -> Tensor:
    """Return numbers in fp8 as float32."""
    return _FP8[stored.dtype].index_select(0, stored.reshape(-1).view(torch.uint8).int()).view(stored.shape)


def dequantize_rows(
    shape: tuple[int, int],
    codes: Callable[[int, int], Tensor],
    scales: Tensor,
    zeros: Tensor | float = 0.0,
    columns: Tensor | int = 1,
) -> Tensor:
    """Return (codes - zeros) * scales, float32, of `shape` [rows, columns].

    Args:
        shape: of the result.
        codes: returns those of the rows from one to before another, both multiples of 8 but at the end.
        scales: [rows, groups].
        zeros: [rows, groups], or one for all.
        columns: how many consecutive columns a group has, or the group of each column.

    Codes and zero points are small whole numbers, so their difference is exact in float32, and so is its product with
    a scale of half precision; with a float32 scale it is rounded once.
    """
    rows, width = shape
    scales = scales.float()
    result = torch.empty(shape)
    step = max(8, _PIECE // width // 8 * 8)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        piece = result[first:last]
        piece.copy_(codes(first, last))
        if isinstance(zeros, Tensor):
            _by_group(piece, zeros[first:last].float(), columns, Tensor.sub_)
        elif zeros:
            piece.sub_(zeros)
        _by_group(piece, scales[first:last], columns, Tensor.mul_)
    return result


def _by_group(piece: Tensor, values: Tensor, columns: Tensor | int, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Apply an operation in place to a piece [rows, width] and the values [rows, groups] of its columns' groups."""
    if isinstance(columns, Tensor):
        apply(piece, values.index_select(1, columns))
        return
    whole = piece.shape[1] // columns  # the last group may be shorter
    if whole:
        apply(piece[:, : whole * columns].view(-1, whole, columns), values[:, :whole, None])
    if piece.shape[1] % columns:
        apply(piece[:, whole * columns :], values[:, whole : whole + 1])


def group_indices(indices: Tensor, name: str, groups: int, size: int) -> Tensor | int:
    """Return a stored `g_idx` as `dequantize_rows` takes it: the group's size where groups are consecutive.

    Numbers that are all 0 (or all -1) beside several groups are a tensor that was never filled in, by tools that did
    not reorder: then groups are consecutive too. An index out of range is a `ModelError`.
    """
    size = min(size, len(indices))
    least, most = int(indices.min()), int(indices.max())
    if least == most and (least == -1 or (least == 0 and groups > 1)):
        return size
    if least < 0 or most >= groups:
        wrong = least if least < 0 else most
        raise ModelError(f"tensor {name!r} names the group {wrong}, but there are {groups}: the file is damaged")
    if torch.equal(indices, torch.arange(len(indices), dtype=indices.dtype) // size):
        return size
    return indices.long()
