"""Matrices in 8 or 4 bits: as operators take them, as modules, and as torch alone computes with them."""

__all__ = ["Codes", "CodesEmbedding", "CodesLinear", "ExpertCodes"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xinfer.backends.torch.kernels import available
from xinfer.backends.torch.load import Join
from xinfer.models.quantize import Packed

_FEW = {8: 4, 4: 8}  # rows up to which multiplying with codes takes less time than making weights of them, by bits


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A matrix [..., out, in] in blocks of inputs: a weight is (code - zero) * scale.

    Attributes:
        codes: uint8 [..., out, blocks * block * bits / 8]; of a block's codes of four bits the first half are the low
            nibbles, the other half the high ones.
        scales: float32 [..., out, blocks].
        zeros: uint8 [..., out, blocks]; None for 2**(bits - 1).
        bits: of a code, 4 or 8.
        columns: in; what fills the last block counts for nothing.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    columns: int

    @classmethod
    def of(cls, packed: Packed, shape: Sequence[int]) -> Self:
        """Return a rounded matrix, or experts' that were rounded as one; `shape` is what it was before."""
        codes = packed.codes.view(*shape[:-1], -1, packed.block)
        if packed.bits == 4:
            half = packed.block // 2
            codes = codes[..., :half] | codes[..., half:] << 4
        scales = packed.scales.view(*shape[:-1], -1)
        zeros = None if packed.zeros is None else packed.zeros.view(scales.shape)
        return cls(codes.flatten(-2), scales, zeros, packed.bits, packed.columns)

    def apply(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """Return them with each part as another tensor of the same numbers."""
        zeros = None if self.zeros is None else change(self.zeros)
        return Codes(change(self.codes), change(self.scales), zeros, self.bits, self.columns)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Codes":
        """Return them on a device; as with `Tensor.to`, the host need not wait until they are there."""
        return self.apply(lambda part: part.to(device, non_blocking=non_blocking))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def narrow(self, dim: int, start: int, length: int) -> "Codes | None":
        """Return a stretch of it, copied; None where that cuts blocks of inputs."""
        codes_at = scales_at = (start, length)
        columns = self.columns
        if dim == self.codes.ndim - 1:
            block = self.codes.shape[-1] * 8 // self.bits // self.scales.shape[-1]
            if start % block or length % block:
                return None
            codes_at, scales_at = (start * self.bits // 8, length * self.bits // 8), (start // block, length // block)
            columns = length
        zeros = None if self.zeros is None else self.zeros.narrow(dim, *scales_at).clone()
        codes, scales = self.codes.narrow(dim, *codes_at).clone(), self.scales.narrow(dim, *scales_at).clone()
        return Codes(codes, scales, zeros, self.bits, columns)

    def fits(self, other: "Codes") -> bool:
        """Whether rows of another can lie below these."""
        mine, theirs = ((c.bits, c.columns, c.scales.shape[-1], c.zeros is None) for c in (self, other))
        return mine == theirs

    def weights(self, at: Tensor | None = None) -> Tensor:
        """Return the weights, float32 [..., out, in], or those of rows `at` [n] only."""
        codes, scales = (each if at is None else each[at] for each in (self.codes, self.scales))
        zeros = self.zeros if at is None or self.zeros is None else self.zeros[at]
        numbers = codes.view(*scales.shape, -1)
        if self.bits == 4:
            numbers = torch.cat([numbers & 15, numbers >> 4], -1)
        middle = float(1 << (self.bits - 1)) if zeros is None else zeros[..., None].float()
        weights: Tensor = (numbers.float() - middle) * scales[..., None]
        return weights.flatten(-2)[..., : self.columns]

    def times(self, x: Tensor) -> Tensor:
        """Return float32 x @ W.T, [T, in] to [T, out], as one sum over products, of which a compiler writes one loop.

        It reads codes instead of weights, once for each row of x: for a single row that is the least there is to read.
        """
        numbers = self.codes.view(*self.scales.shape, -1)
        halves = [numbers] if self.bits == 8 else [numbers & 15, numbers >> 4]
        middle = float(1 << (self.bits - 1)) if self.zeros is None else self.zeros[..., None].float()
        missing = numbers.shape[-2] * numbers.shape[-1] * len(halves) - self.columns
        places = F.pad(x.float(), (0, missing)).view(x.shape[0], 1, numbers.shape[-2], len(halves), -1)
        products = sum((half.float() - middle) * places[..., i, :] for i, half in enumerate(halves))
        out: Tensor = (products * self.scales[..., None]).sum((-2, -1))
        return out


def joined(parts: Sequence[Codes], dim: int, join: Join) -> Codes:
    """Return matrices that fit, one's rows behind the other's along a dimension."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    codes, scales = join([part.codes for part in parts], dim), join([part.scales for part in parts], dim)
    return Codes(codes, scales, join(zeros, dim) if zeros else None, parts[0].bits, parts[0].columns)


class _Held(nn.Module):
    """Holds codes, so that they are among a model's parameters."""

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        self.codes, self.scales = (nn.Parameter(each, False) for each in (codes.codes, codes.scales))
        self.zeros = None if codes.zeros is None else nn.Parameter(codes.zeros, requires_grad=False)
        self.bits, self.columns, self.few = codes.bits, codes.columns, _FEW[codes.bits]

    @property
    def held(self) -> Codes:
        """The codes."""
        return Codes(self.codes, self.scales, self.zeros, self.bits, self.columns)

    def pack(self) -> None:
        """Compute rows alike in any number, as far as oneDNN does."""
        self.few = 0


class CodesLinear(_Held):
    """x @ W.T + b: few rows are multiplied with the codes, for more weights are made, on a CPU piece by piece.

    On a CUDA device `few` is one row. torch has kernels for more, which take other codes than these: of eight bits
    with one scale a row, of four with scales rounded to bfloat16 (`_weight_int8pack_mm`, `_weight_int4pack_mm`).
    """

    def __init__(self, codes: Codes, bias: Tensor | None = None) -> None:
        super().__init__(codes)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if x.device.type == "cpu" and available():
            out: Tensor = torch.ops.xinfer.linear_codes(
                x, self.codes, self.scales, self.zeros, self.bias, self.bits, self.few
            )
            return out
        if x.shape[0] == 1:
            out = self.held.times(x).to(x.dtype)
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.held.weights().to(x.dtype), self.bias)

    def rows(self, start: int, end: int) -> "CodesLinear":
        """Return what computes some of the outputs, with the same codes."""
        held, bias = self.held, None if self.bias is None else self.bias[start:end]
        zeros = None if held.zeros is None else held.zeros[start:end]
        return CodesLinear(Codes(held.codes[start:end], held.scales[start:end], zeros, held.bits, held.columns), bias)


class CodesEmbedding(_Held):
    """Rows of a matrix, in the precision to compute in."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        super().__init__(codes)
        self._dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, in]."""
        if token_ids.device.type == "cpu" and available():
            rows: Tensor = torch.ops.xinfer.rows_of_codes(
                self.codes, self.scales, self.zeros, token_ids, self.bits, self.columns
            )
            return rows.to(self._dtype)
        return self.held.weights(token_ids).to(self._dtype)

    def head(self, bias: Tensor | None) -> CodesLinear:
        """Return what multiplies with the same matrix."""
        return CodesLinear(self.held, bias)


class ExpertCodes(_Held):
    """Projections of several experts."""

    def __init__(self, codes: Codes, bias: Tensor | None = None) -> None:
        super().__init__(codes)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def each(self) -> Iterator[CodesLinear]:
        """Yield those of one expert after the other; their codes are these."""
        for index in range(len(self.codes)):
            zeros = None if self.zeros is None else self.zeros.data[index]
            own = Codes(self.codes.data[index], self.scales.data[index], zeros, self.bits, self.columns)
            yield CodesLinear(own, None if self.bias is None else self.bias.data[index])

    @property
    def at_once(self) -> bool:
        """Whether there is an operator for all experts together, and rows need not come out alike."""
        return self.few > 0 and self.codes.device.type == "cpu" and available()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[T, in] or [T, chosen, in] with the experts' numbers [T, chosen] to [T, chosen, out], if `at_once`."""
        out: Tensor = torch.ops.xinfer.experts_codes(
            x, self.codes, self.scales, self.zeros, chosen, self.bits, self.few
        )
        return out if self.bias is None else out + self.bias[chosen]

    def times(self, x: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertLinear.times`."""
        out = (self.held.weights(chosen) * x.float()[:, None]).sum(-1).to(x.dtype)
        return out if self.bias is None else out + self.bias[chosen]

    def grouped(self, x: Tensor, ends: Tensor, own: Tensor) -> Tensor:
        """See `ExpertLinear.grouped`."""
        out: Tensor = F.grouped_mm(x, self.held.weights().to(x.dtype).mT, offs=ends)
        return out if self.bias is None else out + self.bias[own]
