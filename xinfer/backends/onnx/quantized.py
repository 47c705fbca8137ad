"""Quantized matrices as the graph has them, kept in the cache folder: to round them well takes longer than to load."""

__all__ = ["Rounder", "is_quantized", "quantized_weights"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xinfer.backends.onnx.kept import checkpoint_key, kept
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.model import Model
from xinfer.models.quantize import Packed, Scheme, pack_codes, pack_zeros, quantize
from xinfer.models.reader import Reader


class Rounder:
    """Rounds matrices when a part of them is asked for, and remembers the last: its other parts come next.

    Args:
        load: returns a matrix by its canonical name.
        scheme: how a model is rounded.
    """

    def __init__(self, load: Callable[[str], Tensor], scheme: Scheme) -> None:
        self._load, self._scheme = load, scheme
        self._last: tuple[tuple[str, ...], list[_Rounded]] | None = None

    def part(self, recipe: Recipe) -> Tensor:
        """Return codes [out, blocks, bytes], scales [out, blocks] or zero points of matrices, one below the other.

        Of experts, `stack`, [count, out, ...], a row of codes without what fills its last block; of several such
        `interleaved`, their rows in turns.
        """
        if self._last is None or self._last[0] != recipe.sources:
            self._last = recipe.sources, [self._round(name) for name in recipe.sources]
        form, *shape = recipe.form.split()
        if shape and shape[0] in ("stack", "interleaved"):
            return torch.stack([each.stacked(form) for each in self._last[1]], 2).flatten(1, 2)
        parts = [each.part(form) for each in self._last[1]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _round(self, name: str) -> "_Rounded":
        weight = self._load(name)
        scheme = self._scheme.of(name, tuple(weight.shape))
        assert scheme is not None
        return _Rounded(quantize(weight.flatten(0, -2), scheme, name), tuple(weight.shape))


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A matrix, or experts' as one, with the shape that it had."""

    packed: Packed
    shape: tuple[int, ...]

    def part(self, form: str) -> Tensor:
        if form == "codes":
            return pack_codes(self.packed)
        if form == "scales":
            return self.packed.scales
        zeros = pack_zeros(self.packed)
        assert zeros is not None
        return zeros

    def stacked(self, form: str) -> Tensor:
        """[count, out, ...]."""
        rows = self.part(form).flatten(1)
        if form == "codes":
            rows = rows[:, : self.shape[-1] * self.packed.bits // 8]
        return rows.reshape(*self.shape[:2], -1)


def quantized_weights(model: Model, scheme: Scheme, recipes: Mapping[str, Recipe]) -> dict[str, Tensor]:
    """Return the graph's quantized matrices by name, mapped from the cache folder; rounded now if not there."""
    wanted = {_place(recipe): recipe for recipe in recipes.values() if is_quantized(recipe)}
    if model.load_format == "dummy":
        return _by_name(_rounded(model, scheme, wanted), recipes)
    found = kept(checkpoint_key(model, scheme), wanted, lambda: _rounded(model, scheme, wanted))
    return _by_name(found, recipes)


def is_quantized(recipe: Recipe) -> bool:
    """Whether a weight is a part of quantized matrices."""
    return recipe.form.split()[0] in ("codes", "scales", "zeros")


def _place(recipe: Recipe) -> str:
    """Return where a weight lies: an embedding that is the head too lies there once."""
    return " ".join([recipe.form.removesuffix(" flat"), *recipe.sources])


def _by_name(found: Mapping[str, Tensor], recipes: Mapping[str, Recipe]) -> dict[str, Tensor]:
    chosen = {name: (found[_place(recipe)], recipe.form) for name, recipe in recipes.items() if is_quantized(recipe)}
    return {name: each.flatten(1) if form.endswith("flat") else each for name, (each, form) in chosen.items()}


def _rounded(model: Model, scheme: Scheme, wanted: Mapping[str, Recipe]) -> dict[str, Tensor]:
    sources = dict.fromkeys(source for recipe in wanted.values() for source in recipe.sources)
    with torch.inference_mode(), Reader(model.weights, torch.device("cpu"), torch.float32, list(sources)) as reader:
        rounder = Rounder(reader.load, scheme)
        return {name: rounder.part(recipe) for name, recipe in wanted.items()}
