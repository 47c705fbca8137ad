"""How weights are rounded, and which of them."""

__all__ = ["KINDS", "METHODS", "Scheme", "quantizes"]

import math
from dataclasses import dataclass, replace
from typing import Self

from xinfer.errors import ConfigError, nearest

KINDS = ("int8", "int4")
BLOCKS = (32, 64, 128)
METHODS = ("rtn", "hqq", "gptq")
_WIDE = ("embed.weight", "head.weight")
# Names, within a layer, of matrices that are quantized; those of experts and shared experts end alike.
_MATRICES = ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model's matrices are rounded; a value that is none of the choices is a `ConfigError`.

    Attributes:
        bits: of a code, 4 or 8.
        block: consecutive inputs that share a scale, 32, 64 or 128.
        symmetric: whether zero is the middle code, 2**(bits - 1), instead of one that each block chooses.
        method: `rtn` takes the scale from a block's extremes; `hqq` looks for the least squared error; `gptq` for the
            least error of what comes of it, on a text.
        wide_bits: of what suffers most from few bits, if more than `bits`: embedding, head, and value projections.
    """

    bits: int
    block: int = 32
    symmetric: bool = True
    method: str = "gptq"
    wide_bits: int = 8

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("bits", self.bits, (4, 8)),
            ("quantization_block", self.block, BLOCKS),
            ("quantization_method", self.method, METHODS),
            ("wide_bits", self.wide_bits, (4, 8)),
        ):
            if value not in choices:
                prefix = "model." if key.startswith("quantization") else "quantization: "
                raise ConfigError(_unknown(prefix + key, value, choices))

    @classmethod
    def configured(
        cls,
        kind: str | None,
        *,
        block: int | None = None,
        method: str | None = None,
        symmetric: bool | None = None,
    ) -> Self | None:
        """Return what `model.quantization` and the keys beside it ask for; None where that is nothing.

        Args:
            kind: None, `int8` or `int4`; another is a `ConfigError`.
            block: of the scheme, as the next two; None takes the kind's default, and a value without a kind is a
                `ConfigError`.
            method: see `Scheme`.
            symmetric: see `Scheme`.
        """
        given = {"block": block, "method": method, "symmetric": symmetric}
        given = {name: value for name, value in given.items() if value is not None}
        if kind is None:
            for name, value in given.items():
                raise ConfigError(
                    f"model.quantization_{name}={value} has no effect without model.quantization: give that too "
                    f"(there are: {', '.join(KINDS)})"
                )
            return None
        if kind not in KINDS:
            raise ConfigError(_unknown("model.quantization", kind, KINDS))
        return cls(**{**_DEFAULTS[kind], **given})  # type: ignore[arg-type]

    def of(self, name: str, shape: tuple[int, ...]) -> "Scheme | None":
        """Return how a tensor with this canonical name and shape is rounded; None where it is not.

        Embedding and head, on which likelihoods depend most, are in blocks of 32. With eight bits a zero point of a
        block's own is worth nothing, so what is wider than the rest is symmetric.
        """
        if not quantizes(name, shape):
            return None
        at_the_ends = name in _WIDE
        wider = self.bits < self.wide_bits and (at_the_ends or name.endswith(".attn.v.weight"))
        return replace(
            self,
            bits=self.wide_bits if wider else self.bits,
            block=BLOCKS[0] if at_the_ends else self.block,
            symmetric=self.symmetric or wider,
        )

    @property
    def smooths(self) -> bool:
        """Whether matrices' inputs are evened out; see `smoothing`."""
        return self.method == "gptq"

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of codes, float32 scales and zero points of a matrix [..., in] that is rounded so."""
        rows, blocks = math.prod(shape[:-1]), -(-shape[-1] // self.block)
        zeros = 0 if self.symmetric else -(-blocks * self.bits // 8)
        return rows * (blocks * (self.block * self.bits // 8 + 4) + zeros)


_DEFAULTS: dict[str, dict[str, object]] = {
    "int8": {"bits": 8, "block": 64, "symmetric": True, "method": "gptq"},
    "int4": {"bits": 4, "block": 32, "symmetric": False, "method": "gptq"},
}


def quantizes(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor with this canonical name is quantized: embedding, head, projections and experts.

    Routers, a shared expert's gate, learned positions, and the small matrices of latent attention (`k_b`, `v_b`) that
    backends fold into others stay as they are, as do all vectors.
    """
    if name in _WIDE:
        return True
    return (
        name.startswith("layers.")
        and len(shape) >= 2
        and name.split(".")[-2:-1][0] in _MATRICES
        and (name.endswith(".weight"))
    )


def _unknown(key: str, value: object, choices: tuple[object, ...]) -> str:
    listed = ", ".join(map(str, choices))
    return f"{key}={value} is unknown{nearest(str(value), map(str, choices))} (there are: {listed})"
