"""From weights to codes: what `Scheme.method` names.

`rtn` (round to nearest) takes a block's scale from its extremes: symmetric, the number with the largest absolute value
gets the lowest code, which uses all codes (llama.cpp's Q4_0); otherwise the range from the least to the greatest
number, and to 0, is divided evenly, and the zero point is rounded.

`hqq` is half-quadratic quantization's alternation: codes for given scale and zero point, then the best scale for given
codes. It differs from the paper in what was measured to be better (experiments/quantization.py). The error is squared:
the paper's power of 0.7 lets outliers go, and a small model's answers suffer more than from `rtn`. So there is no
proximal step, and the scale, which the paper keeps, is a projection. Zero points are whole numbers, which kernels want,
and hardly ever move by small steps, so each block tries several, with several first scales. The best of all that were
met counts, the first of them `rtn`'s own, so the squared error is never above that of `rtn`.

`gptq` (`gptq.py`) needs to know a matrix's inputs; without them it is `hqq`.

Source: Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023; ggml, ggml-quants.c
(`quantize_row_q4_0_ref`).
"""

__all__ = ["quantize"]

from collections.abc import Iterator

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantize.gptq import Gram, propagated
from xinfer.models.quantize.packed import Packed
from xinfer.models.quantize.scheme import Scheme

_PIECE = 1 << 18  # numbers at a time; what is computed from them stays in the caches, and memory bounded
_PIECE_OF_GPTQ = 1 << 22  # which takes as many calls for few rows as for many
_SHRINKS = (1.0, 0.9, 0.8)  # of the first scale, on which the alternation starts: outliers may be cut
_SHIFTS = (0, -1, 1)  # of the first zero point
_ROUNDS = 2  # of the alternation; more find next to nothing


def quantize(weight: Tensor, scheme: Scheme, name: str = "weight", gram: Gram | None = None) -> Packed:
    """Round a matrix.

    Args:
        weight: [out, in] of any float type; stacked experts are [experts * out, in].
        scheme: how; see `Scheme.of`.
        name: the tensor's, for the `ModelError` that a number which is not finite is.
        gram: of its inputs, for `gptq`.

    A row's codes depend on the row (and its inputs) alone, not on neighbours; but for `gptq`, whose long sums are the
    linear algebra library's, not on threads either. Memory beside the result is bounded.
    """
    rows, columns = weight.shape
    blocks = -(-columns // scheme.block)
    packed = Packed(
        torch.empty(rows, blocks * scheme.block, dtype=torch.uint8),
        torch.empty(rows, blocks),
        None if scheme.symmetric else torch.empty(rows, blocks, dtype=torch.uint8),
        scheme.bits,
        columns,
    )
    gram = gram if scheme.method == "gptq" else None
    step = max(1, (_PIECE if gram is None else _PIECE_OF_GPTQ) // (blocks * scheme.block))
    with torch.inference_mode():
        for first in range(0, rows, step):
            piece = weight[first : first + step].float().contiguous()
            if not bool(piece.isfinite().all()):
                raise ModelError(f"tensor {name!r} holds NaN or infinity and can't be quantized: it is damaged")
            _round_piece(piece, scheme, packed, first, gram)
    return packed


def _round_piece(piece: Tensor, scheme: Scheme, packed: Packed, first: int, gram: Gram | None) -> None:
    """Fill in the codes, scales and zero points of some rows [n, in]."""
    count, columns = piece.shape
    rows, more = slice(first, first + count), packed.codes.shape[1] - columns
    padded = torch.nn.functional.pad(piece, (0, more))
    numbers = padded.view(-1, scheme.block).T.contiguous()  # [block, n]: what each block shares lies side by side
    scales, zeros = _extremes(numbers, scheme)
    if scheme.method != "rtn":
        weights: Tensor | None = None
        if gram is not None:
            weights = torch.nn.functional.pad(gram.squares, (0, more)).view(-1, scheme.block).T.repeat(1, count)
        scales, zeros = _least_squares(numbers, scales, zeros, scheme, weights)
    codes = _codes(numbers, scales, zeros, scheme).T.reshape(count, -1)
    scales, zeros = scales.view(count, -1), zeros.view(count, -1)
    if gram is not None:
        top = (1 << scheme.bits) - 1
        codes[:, :columns], scales = propagated(piece, codes[:, :columns], scales, zeros, gram, scheme.block, top)
    packed.codes[rows] = codes.to(torch.uint8)
    packed.scales[rows] = scales
    if packed.zeros is not None:
        packed.zeros[rows] = zeros.to(torch.uint8)


def _extremes(numbers: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points [n] of `rtn`; a block of zeros, or too small for a scale, has the scale 1."""
    if scheme.symmetric:
        middle = 1 << (scheme.bits - 1)
        low, high = numbers.amin(0), numbers.amax(0)
        scales = torch.where(-low >= high, low, high) / -middle
        zeros = torch.full_like(scales, middle)
    else:
        last = (1 << scheme.bits) - 1
        low, high = numbers.amin(0).clamp(max=0), numbers.amax(0).clamp(min=0)
        scales = high / last - low / last  # the difference itself may be infinite
        zeros = torch.where(scales == 0, 0, -low / scales).round_().clamp_(0, last)
    return torch.where(scales == 0, 1, scales), zeros


def _codes(numbers: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme) -> Tensor:
    """Return the nearest codes, as floats; the zero point is added last, so that its rounding is none."""
    return (numbers / scales).round_().add_(zeros).clamp_(0, (1 << scheme.bits) - 1)


def _least_squares(
    numbers: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points [n] with the least squared error, weighed by `weights`, that was met.

    Where squares are beyond float32 no comparison holds, and the first ones stay.
    """
    best_scales, best_zeros = scales.clone(), zeros.clone()
    least = torch.full_like(scales, torch.inf)
    for start, zero in _starts(scales, zeros, scheme):
        scale = start
        for _ in range(_ROUNDS):
            codes = _codes(numbers, scale, zero, scheme).sub_(zero)
            squares = (codes * scale).sub_(numbers).square_()
            error = _total(squares if weights is None else squares.mul_(weights))
            better = error < least
            least = torch.where(better, error, least)
            best_scales = torch.where(better, scale, best_scales)
            best_zeros = torch.where(better, zero, best_zeros)
            scale = _project(numbers, codes, scale, weights)
    return best_scales, best_zeros


def _starts(scales: Tensor, zeros: Tensor, scheme: Scheme) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zero points to start on, those of `rtn` first."""
    for shrink in _SHRINKS:
        if scheme.symmetric:
            yield scales * shrink, zeros
            yield scales * -shrink, zeros  # the other side gets the code that there is more of
        else:
            for shift in _SHIFTS:
                yield scales * shrink, (zeros + shift).clamp_(0, (1 << scheme.bits) - 1)


def _project(numbers: Tensor, codes: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
    """Return the scales with the least squared error for codes (without zero points), where there is one."""
    weighed = codes if weights is None else codes * weights
    found = _total(weighed * numbers) / _total(weighed * codes)
    return torch.where(found.isfinite() & (found != 0), found, scale)


def _total(numbers: Tensor) -> Tensor:
    """Return the sums [n] of [block, n], halves added to halves: torch's own order depends on n and on threads."""
    while len(numbers) > 1:
        numbers = numbers[: len(numbers) // 2] + numbers[len(numbers) // 2 :]
    return numbers[0]
