"""Rounding by what comes of it: the inputs that a matrix gets say which errors matter, and which make up for others.

The error of a row is e G e', where e is how far it is from what its codes stand for, and G the mean of x x' over inputs
x. GPTQ rounds a row's weights one after the other, those of the largest inputs first, and lets what is not yet rounded
make up for each error, by G's inverse. Here scales and zero points of all blocks are chosen before, as `hqq` does with
each error weighed by its mean square, so that codes may be taken in any order; and once there are codes, the scales
follow them, block by block, each to where the row's error is least. Then codes are chosen once more. Of what was met
the best counts.

Source: Frantar et al., GPTQ, arXiv:2210.17323, and its implementation's options `actorder` and `static_groups`.
"""

__all__ = ["Gram", "propagated"]

from functools import cached_property

import torch
from torch import Tensor

_DAMPING = 0.05  # of the mean square, added to each: inputs that a text leaves out may come all the same
_LAZY = 64  # columns after which errors are passed on to all further ones at once
_ROUNDS = 2  # codes, then scales
_SWEEPS = 2  # over a row's scales


class Gram:
    """The inputs of a matrix, as far as rounding has to know them.

    Args:
        mean: [in, in], the mean of x x' over inputs x.
    """

    def __init__(self, mean: Tensor) -> None:
        squares = mean.diagonal()
        average = float(squares.mean())
        self.matrix = mean + torch.eye(len(mean)) * (_DAMPING * average if average > 0 else 1.0)

    def __len__(self) -> int:
        return len(self.matrix)

    @property
    def squares(self) -> Tensor:
        """[in], the mean square of each input, and a little."""
        return self.matrix.diagonal()

    @cached_property
    def order(self) -> Tensor:
        """[in], columns in the order in which they are rounded."""
        return torch.argsort(self.squares, descending=True, stable=True)

    @cached_property
    def passing(self) -> Tensor:
        """[in, in], upper triangular: row i tells later columns, in `order`, what to take of an error in column i."""
        matrix, more = self.matrix[self.order][:, self.order].double(), float(self.squares.mean())
        while True:
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if not failed:
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
                if not failed:
                    passing: Tensor = (upper / upper.diagonal()[:, None]).float()
                    return passing
            matrix = matrix + torch.eye(len(matrix), dtype=matrix.dtype) * (_DAMPING * more)  # nearly singular
            more *= 10

    def errors(self, difference: Tensor) -> Tensor:
        """Return the error [n] of rows [n, in] that are so far off."""
        return ((difference @ self.matrix) * difference).sum(1)


def propagated(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, gram: Gram, block: int, top: int
) -> tuple[Tensor, Tensor]:
    """Return codes [n, in] and scales [n, blocks] of rows [n, in], with which no row is off by more than before.

    Args:
        weight: float32.
        codes: to begin with [n, in], as floats.
        scales: to begin with [n, blocks], none of them 0.
        zeros: zero points [n, blocks], which stay.
        gram: of the inputs.
        block: inputs that share a scale.
        top: the highest code.
    """

    def wide(numbers: Tensor) -> Tensor:  # [n, blocks] to [n, in]
        return numbers.repeat_interleave(block, 1)[:, : weight.shape[1]]

    each = wide(zeros)
    best_codes, best_scales = codes, scales
    least = gram.errors(weight - (codes - each) * wide(scales))
    for _ in range(_ROUNDS):
        codes = _codes(weight, wide(scales), each, gram, top)
        scales = _fitted(weight, codes - each, scales, gram, block)
        error = gram.errors(weight - (codes - each) * wide(scales))
        better = (error < least)[:, None]
        least = torch.minimum(error, least)
        best_codes, best_scales = codes.where(better, best_codes), scales.where(better, best_scales)
    return best_codes, best_scales


def _codes(weight: Tensor, scales: Tensor, zeros: Tensor, gram: Gram, top: int) -> Tensor:
    """Return codes [n, in] as floats, each column's error passed on to those behind it in order."""
    order, passing = gram.order, gram.passing
    left, scale, zero = (each.T[order].contiguous() for each in (weight, scales, zeros))  # [in, n]
    codes = torch.empty_like(left)
    for first in range(0, len(left), _LAZY):
        last = min(first + _LAZY, len(left))
        errors = torch.empty(last - first, left.shape[1])
        for column in range(first, last):
            code = (left[column] / scale[column]).round_().add_(zero[column]).clamp_(0, top)
            codes[column] = code
            error = errors[column - first] = left[column] - code.sub_(zero[column]).mul_(scale[column])
            left[column + 1 : last].addr_(passing[column, column + 1 : last], error, alpha=-1)
        left[last:].addmm_(passing[first:last, last:].T, errors, alpha=-1)
    found = torch.empty_like(codes)
    found[order] = codes
    return found.T


def _fitted(weight: Tensor, steps: Tensor, scales: Tensor, gram: Gram, block: int) -> Tensor:
    """Return scales [n, blocks] with which codes, in steps [n, in] from their zero points, are off by less."""
    columns, scales = weight.shape[1], scales.clone()
    difference = weight - steps * scales.repeat_interleave(block, 1)[:, :columns]
    for _ in range(_SWEEPS):
        for index, first in enumerate(range(0, columns, block)):
            own = slice(first, first + block)
            change = ((difference @ gram.matrix[:, own]) * steps[:, own]).sum(1)
            change /= ((steps[:, own] @ gram.matrix[own, own]) * steps[:, own]).sum(1)
            fitted = scales[:, index] + change
            change = torch.where(fitted.isfinite() & (fitted != 0), change, 0)
            scales[:, index] += change
            difference[:, own] -= change[:, None] * steps[:, own]
    return scales
