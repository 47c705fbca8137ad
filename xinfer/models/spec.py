"""A decoder described once, as data, before any backend touches it."""

__all__ = ["AttentionSpec", "DecoderSpec", "LayerSpec", "MlpSpec", "RopeSpec"]

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, half-split layout: dimension i turns with dimension i + dim / 2.

    Attributes:
        dim: dimensions that turn (those of a head).
        theta: base of the wavelengths.
        kind: `default`, `linear`, `llama3`, or `factors`.
        factor: how much longer the context becomes (linear, llama3).
        low_freq_factor, high_freq_factor, original_max_len: where llama3 leaves wavelengths alone.
        factors: one for each pair, by which its frequency is divided (factors).
    """

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    factors: tuple[float, ...] = ()

    def inverse_frequencies(self) -> NDArray[np.float32]:
        """Return the angle per position of each pair of dimensions, [dim / 2].

        llama3: https://github.com/meta-llama/llama-models, `apply_scaling`; wavelengths longer than
        original_max_len / low_freq_factor are stretched, shorter than original_max_len / high_freq_factor are left,
        between them the two are mixed. Computed in float32 from the exponents on, as the reference does.
        """
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        inverse = (np.float32(1.0) / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.kind == "linear":
            return inverse / np.float32(self.factor)
        if self.kind == "factors":
            return (inverse / np.array(self.factors, np.float32)).astype(np.float32)
        if self.kind == "llama3":
            wavelength = 2 * math.pi / inverse
            span = self.high_freq_factor - self.low_freq_factor
            keep = np.clip((self.original_max_len / wavelength - self.low_freq_factor) / span, 0, 1)
            return ((1 - keep) * inverse / self.factor + keep * inverse).astype(np.float32)
        return inverse


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    Attributes:
        heads, kv_heads, head_dim: query heads, key/value heads, width of each.
        rope: its rotary embedding.
        qkv_bias, output_bias: whether the projections have biases.
        qk_norm: whether queries and keys are RMS-normalized per head before turning.
        window: keys that a query sees, itself included; None for all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @property
    def scale(self) -> float:
        """Factor on queries times keys."""
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A gated feed-forward part: down(silu(gate(x)) * up(x))."""

    size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder: embedding, layers, a last norm, a head.

    Attributes:
        family: which family described it.
        vocab_size, hidden_size: shape of the embedding.
        max_model_len: longest context that it was made for.
        norm_eps: epsilon of every RMS norm.
        tied: whether the head is the embedding.
        layers: from first to last.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    norm_eps: float
    tied: bool
    layers: tuple[LayerSpec, ...]

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every weight under its canonical name, with its shape; a projection is [out, in]."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for i, layer in enumerate(self.layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_tensors(layer, hidden).items()}
        shapes["norm.weight"] = (hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Numbers learned, a tied head counted once."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def step_read_parameters(self) -> int:
        """Weights that one decode step reads: all, but of an untied embedding one row, which is not counted."""
        return self.parameters - (0 if self.tied else self.vocab_size * self.hidden_size)

    @property
    def kv_token_elements(self) -> int:
        """Numbers that one token leaves in the KV cache, over all layers."""
        return sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in self.layers)


def _layer_tensors(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    a, size = layer.attention, layer.mlp.size
    projections = {
        "attn.q": (a.heads * a.head_dim, hidden, a.qkv_bias),
        "attn.k": (a.kv_heads * a.head_dim, hidden, a.qkv_bias),
        "attn.v": (a.kv_heads * a.head_dim, hidden, a.qkv_bias),
        "attn.o": (hidden, a.heads * a.head_dim, a.output_bias),
        "mlp.gate": (size, hidden, layer.mlp.bias),
        "mlp.up": (size, hidden, layer.mlp.bias),
        "mlp.down": (hidden, size, layer.mlp.bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if a.qk_norm:
        shapes |= {"attn.q_norm.weight": (a.head_dim,), "attn.k_norm.weight": (a.head_dim,)}
    return shapes
