"""Randomness without state: Philox4x32-10, a counter-based generator.

A draw is a pure function of (seed, position, index, stream), so nothing can rewind, share or reorder it: whoever else
is in the batch, however often a sequence is put aside, the same token position sees the same number.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

__all__ = ["MAX_SEED", "derive", "fresh_seed", "philox", "uniform"]

import secrets
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_SEED = 2**64 - 1

# What a draw is for. Draws of different streams are independent, whatever their seeds and positions.
TOKEN, SEED = 0, 1

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _SHIFT = 0xFFFFFFFF, 32
_FEW = 8  # rows that plain integers are faster for than arrays

Word = TypeVar("Word", NDArray[Any], int)


def philox(key: tuple[Word, Word], counter: tuple[Word, Word, Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Run ten rounds of Philox4x32 over 32-bit words: plain numbers, or arrays of uint64, all of one shape [N]."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: list[int], positions: list[int], indices: list[int] | None = None) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each row, with 53 random bits.

    Args:
        seeds: 64-bit seeds, [N].
        positions: absolute position of the token to be drawn, counted from the start of the prompt, [N].
        indices: which of a request's samples this is (zero without `n > 1`), [N].
    """
    if len(seeds) <= _FEW:
        places = zip(seeds, positions, indices or [0] * len(seeds), strict=True)
        return np.array([_uniform(*place) for place in places], np.float64)
    seed, position = np.array(seeds, np.uint64), np.array(positions, np.uint64)
    zeros = np.zeros_like(seed)
    index = zeros if indices is None else np.array(indices, np.uint64)
    counter = (position & _LOW, index & _LOW, zeros + TOKEN, zeros)
    word0, word1, _, _ = philox((seed & _LOW, seed >> _SHIFT), counter)
    bits = ((word0 << _SHIFT) | word1) >> 11
    draws: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return draws


def _uniform(seed: int, position: int, index: int) -> float:
    """Return one row's number by plain integers, which for few rows takes less time than arrays."""
    counter = (position & _LOW, index & _LOW, TOKEN, 0)
    word0, word1, _, _ = philox((seed & _LOW, seed >> _SHIFT), counter)
    return ((word0 << _SHIFT | word1) >> 11) * 2.0**-53


def derive(seed: int, index: int) -> int:
    """Return the seed of request `index` of a run whose seed is `seed`; request 0 has the run's seed itself."""
    if index == 0:
        return seed
    word0, word1, _, _ = philox((seed & _LOW, seed >> _SHIFT), (index, 0, SEED, 0))
    return word0 << _SHIFT | word1


def fresh_seed() -> int:
    """Return a seed from the operating system, short enough (32 bits) to be typed again."""
    return secrets.randbits(32)
