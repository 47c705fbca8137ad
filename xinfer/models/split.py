"""A model shared out among processes: what of it each has."""

__all__ = ["Share", "shares"]

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from xinfer.errors import ConfigError
from xinfer.models.layers import LayerSpec
from xinfer.models.spec import DecoderSpec


@dataclass(frozen=True)
class Share:
    """One of several processes' part of a model.

    Each has some heads of attention and some columns of every feed-forward part, each expert's too; what both return
    is then to be added up over all processes. Everything else is the same in each.

    Attributes:
        whole: the model.
        rank: which part it is, from 0.
        count: of how many. One that does not divide heads and widths is a `ConfigError`.
    """

    whole: DecoderSpec
    rank: int
    count: int

    @cached_property
    def spec(self) -> DecoderSpec:
        """The part, as a model of its own."""
        for index, layer in enumerate(self.whole.layers):
            for name, size in _divided(layer):
                if size % self.count:
                    raise ConfigError(
                        f"parallel.tensor={self.count} does not divide layers[{index}].{name}={size}: of this model "
                        f"{', '.join(map(str, shares(self.whole)))} can be taken"
                    )
            if layer.attention.qk_norm is not None and layer.attention.qk_norm_over == "all":
                raise ConfigError(
                    f"parallel.tensor={self.count}: layers[{index}].attention.qk_norm_over=all normalizes all heads as "
                    "one, so that they can't be shared out: leave it out"
                )
        return replace(self.whole, layers=tuple(map(self._layer, self.whole.layers)))

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        attention, mlp, count = layer.attention, layer.mlp, self.count
        kv_heads = attention.kv_heads if attention.latent is not None else attention.kv_heads // count
        experts = mlp.experts
        if experts is not None and experts.shared is not None:
            experts = replace(experts, shared=experts.shared // count)
        return replace(
            layer,
            attention=replace(attention, heads=attention.heads // count, kv_heads=kv_heads),
            mlp=replace(mlp, size=mlp.size // count, experts=experts),
        )

    def where(self, name: str) -> tuple[int, int, int] | None:
        """Return (dimension, start, length) of a tensor's part by its canonical name; None for all of it."""
        shapes = zip(self.whole.tensors[name], self.spec.tensors[name], strict=True)
        for dim, (size, part) in enumerate(shapes):
            if size != part:
                return dim, self.rank * part, part
        return None

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor's part; of what is added to a sum over all processes, only the first has any."""
        if self.rank and name.endswith((".attn.o.bias", ".down.bias")):
            return tensor.new_zeros(tensor.shape)
        place = self.where(name)
        return tensor if place is None else tensor.narrow(*place).clone(memory_format=torch.contiguous_format)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """Start and end of the part's logits; the last part may have fewer, or none."""
        each = -(-self.whole.vocab_size // self.count)
        ends = [min(self.whole.vocab_size, each * rank) for rank in (self.rank, self.rank + 1)]
        return ends[0], ends[1]


def shares(spec: DecoderSpec) -> list[int]:
    """Return the numbers of processes that divide all that is shared out."""
    common = math.gcd(*(size for layer in spec.layers for _, size in _divided(layer)))
    return [count for count in range(1, common + 1) if common % count == 0]


def _divided(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """Yield what is shared out of a layer."""
    attention, experts = layer.attention, layer.mlp.experts
    yield "attention.heads", attention.heads
    if attention.latent is None:
        yield "attention.kv_heads", attention.kv_heads
    yield "mlp.size", layer.mlp.size
    if experts is not None and experts.shared is not None:
        yield "mlp.experts.shared", experts.shared
