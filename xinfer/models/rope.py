"""Rotary position embeddings: how fast each pair of dimensions turns, in every scaling that checkpoints use."""

__all__ = ["KINDS", "RopeSpec", "mscale"]

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")

Floats = NDArray[np.float32]


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return by how much yarn has attention sharpened in a context that is longer by this factor."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` dimensions of a head.

    Attributes:
        dim: dimensions that turn.
        theta: base of the wavelengths.
        kind: one of `KINDS`.
        interleaved: whether dimension 2i turns with 2i + 1; else dimension i with i + dim / 2.
        factor: how much longer the context becomes (linear, dynamic, llama3, yarn, longrope).
        original_max_len: tokens of context before it was made longer (all but linear; query_growth).
        low_freq_factor, high_freq_factor: where llama3 leaves wavelengths alone.
        beta_fast, beta_slow: turns within the original context between which yarn mixes.
        truncate: whether yarn mixes between whole dimensions.
        short, long: for each pair what its frequency is divided by, in contexts up to the original length and beyond
            (longrope); `factors` has `short` alone.
        amplitude: factor on cosine and sine (yarn, longrope).
        query_growth: g in 1 + g * log(1 + n), a factor on queries at a position that is n original contexts on.
    """

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_len: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    amplitude: float = 1.0
    query_growth: float = 0.0

    @property
    def depends_on_length(self) -> bool:
        """Whether contexts longer than the original one turn all positions otherwise."""
        return self.kind in ("dynamic", "longrope")

    def inverse_frequencies(self, max_len: int) -> Floats:
        """Return the angle per position of each pair of dimensions, [dim / 2].

        Two kinds depend on the length of the context. Here that is `max_len`, the most tokens that a sequence of this
        run may have, and not what a sequence has so far: so a position turns alike for all, whenever it is computed,
        and its keys stay valid. Computed in float32 from the exponents on, as the reference does.

        Sources: dynamic, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr; llama3,
        https://github.com/meta-llama/llama-models (`apply_scaling`); yarn, arXiv:2309.00071; longrope,
        arXiv:2402.13753.
        """
        if self.kind == "linear":
            return self._inverse() / np.float32(self.factor)
        if self.kind == "dynamic":
            return self._inverse(self._stretched_theta(max_len))
        if self.kind in ("factors", "longrope"):
            divisors = self.long if self.kind == "longrope" and max_len > self.original_max_len else self.short
            return (self._inverse() / np.array(divisors, np.float32)).astype(np.float32)
        if self.kind == "llama3":
            return self._llama3(self._inverse())
        if self.kind == "yarn":
            return self._yarn(self._inverse())
        return self._inverse()

    def _inverse(self, theta: float | None = None) -> Floats:
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        base = np.float32(self.theta if theta is None else theta)
        return (np.float32(1.0) / base**exponents).astype(np.float32)

    def _stretched_theta(self, max_len: int) -> float:
        length = max(max_len, self.original_max_len)
        growth = self.factor * length / self.original_max_len - (self.factor - 1)
        return float(self.theta * growth ** (self.dim / (self.dim - 2)))

    def _llama3(self, inverse: Floats) -> Floats:
        """Stretch long wavelengths, leave short ones, mix those between."""
        wavelength = 2 * math.pi / inverse
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((self.original_max_len / wavelength - self.low_freq_factor) / span, 0, 1)
        return ((1 - keep) * inverse / self.factor + keep * inverse).astype(np.float32)

    def _yarn(self, inverse: Floats) -> Floats:
        """Stretch dimensions that turn less than beta_slow times, leave those that do more than beta_fast times."""

        def dimension(turns: float) -> float:
            return self.dim * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low if high != low else 0.001
        stretch = np.clip((np.arange(self.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
        mixed: Floats = (inverse / np.float32(self.factor) * stretch + inverse * (1 - stretch)).astype(np.float32)
        return mixed
