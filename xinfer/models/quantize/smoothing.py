"""Inputs of matrices, evened out: what a norm makes larger, the matrices behind it can be made smaller by, and back.

A kernel that rounds inputs too, a block of them to a scale, loses the small ones beside a large one. The model stays
the same if what makes an input is divided by a factor and the input's column multiplied by it. A factor is a power of
the input's root mean square. It makes columns as unlike as it makes inputs alike: the fewer bits, the less.

What can be divided is a norm's factors, and rows of `up`, which what comes out of a gated part is proportional to. A
tied embedding that is multiplied as the head is divided again where a token is looked up (`LOOKUP`).

Source: Xiao et al., SmoothQuant, arXiv:2211.10438; Lin et al., AWQ, arXiv:2306.00978, for factors by inputs alone.
"""

__all__ = ["LOOKUP", "Site", "Smoothed", "sites"]

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xinfer.models.layers import LayerSpec, NormSpec
from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Weights

LOOKUP = "embed.factors"  # [hidden], by which what is looked up of a tied embedding is multiplied
_POWER = {8: 0.45, 4: 0.25}  # of a root mean square, by the bits of a weight (experiments/quantization.py)
_ATTENTION = ("q", "k", "v", "q_a", "kv_a")  # what multiplies a layer's normalized input


@dataclass(frozen=True, slots=True)
class Site:
    """An input that can be evened out.

    Attributes:
        makers: tensors whose first axis is that of the input, which is proportional to them.
        users: matrices that multiply it, all there are.
        norm: what the makers belong to, if they are a norm's.
    """

    makers: tuple[str, ...]
    users: tuple[str, ...]
    norm: NormSpec | None = None

    @property
    def name(self) -> str:
        """Which one it is, by one of its matrices."""
        return self.users[0]


def sites(spec: DecoderSpec) -> Iterator[Site]:
    """Yield the inputs of a model's matrices that can be evened out."""
    for index, layer in enumerate(spec.layers):
        yield from _of_layer(spec, layer, f"layers.{index}.")
    if spec.norm.weight:
        yield Site(_of_norm("norm", spec.norm), ("embed.weight" if spec.tied else "head.weight",), spec.norm)


def _of_layer(spec: DecoderSpec, layer: LayerSpec, prefix: str) -> Iterator[Site]:
    dense = layer.mlp.experts is None
    attention = [name for each in _ATTENTION if (name := f"{prefix}attn.{each}.weight") in spec.tensors]
    mlp = [name for each in ("gate", "up") if (name := f"{prefix}mlp.{each}.weight") in spec.tensors]
    shared = layer.parallel and layer.mlp_norm is None
    if layer.attn_norm is not None and layer.attn_norm.weight and (dense or not shared):
        users = attention + (mlp if shared else [])
        yield Site(_of_norm(f"{prefix}attn_norm", layer.attn_norm), tuple(users), layer.attn_norm)
    if layer.mlp_norm is not None and layer.mlp_norm.weight and dense:
        yield Site(_of_norm(f"{prefix}mlp_norm", layer.mlp_norm), tuple(mlp), layer.mlp_norm)
    if layer.mlp.gated and dense and layer.mlp.activation != "swiglu":
        makers = [f"{prefix}mlp.up.weight"] + ([f"{prefix}mlp.up.bias"] if layer.mlp.bias else [])
        yield Site(tuple(makers), (f"{prefix}mlp.down.weight",))


def _of_norm(name: str, norm: NormSpec) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if norm.bias else (f"{name}.weight",)


class Smoothed(Weights):
    """Weights whose matrices get inputs that lie less far apart; together they are the same model.

    Args:
        weights: the model's own.
        factors: [in] of sites by name; of those that come later see `even_out`.
    """

    def __init__(self, weights: Weights, factors: dict[str, Tensor]) -> None:
        vars(self).update(vars(weights))
        self._whole, self.factors = weights, factors
        self._sites = {site.name: site for site in sites(weights.spec)}
        self._made = {maker: site for site in self._sites.values() for maker in site.makers}
        self._used = {user: site for site in self._sites.values() for user in site.users}

    def even_out(self, name: str, squares: Tensor, bits: int) -> Tensor | None:
        """Choose the factors of the site of a matrix, whose weights get so many bits; None if it has none.

        Args:
            name: of the first matrix of a site; another has what was chosen for that.
            squares: [in], the mean square of each input.
            bits: of a weight.
        """
        site = self._used.get(name)
        if site is None:
            return None
        if site.name not in self.factors:
            logs = squares.clamp(min=squares.mean() * 1e-6 + 1e-30).log()
            self.factors[site.name] = ((logs - logs.mean()) * (_POWER[bits] / 2)).exp()
        return self.factors[site.name]

    def load(self, canonical: str) -> Tensor:
        """Return one tensor."""
        if canonical == LOOKUP:
            return 1 / self.factors.get("embed.weight", torch.ones(self.spec.hidden_size))
        tensor = self._whole.load(canonical)
        used, made = self._used.get(canonical), self._made.get(canonical)
        if used is not None and (factors := self.factors.get(used.name)) is not None:
            tensor = tensor.float() * factors
        if made is not None and (factors := self.factors.get(made.name)) is not None:
            offset = made.norm.offset if made.norm is not None and canonical.endswith(".weight") else 0.0
            tensor = (tensor.float() + offset) / factors.view(-1, *[1] * (tensor.dim() - 1)) - offset
        return tensor
