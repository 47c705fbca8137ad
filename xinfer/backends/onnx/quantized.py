"""Quantized matrices as the graph has them, kept in the cache folder: to round them well takes longer than to load."""

__all__ = ["Rounder", "is_quantized", "quantized_weights"]

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.observed import Inputs, observed
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.kept import checkpoint_key, code_hash, kept
from xinfer.models.model import Model
from xinfer.models.quantize import Gram, Packed, Scheme, Smoothed, pack_codes, pack_zeros, quantize, sites
from xinfer.models.reader import Reader

log = logging.getLogger(__name__)

Make = Callable[[Recipe, Reader, Form], Tensor]
_FACTORS = "factors "  # of which input, in what is kept


class Rounder:
    """Rounds matrices when a part of them is asked for, and remembers the last: its other parts come next.

    Args:
        load: returns a matrix by its canonical name.
        scheme: how a model is rounded.

    Attributes:
        grams: of matrices' inputs, by canonical names, where they are known.
    """

    def __init__(self, load: Callable[[str], Tensor], scheme: Scheme) -> None:
        self._load, self._scheme = load, scheme
        self._last: tuple[tuple[str, ...], list[_Rounded]] | None = None
        self.grams: dict[str, Gram] = {}

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
        packed = quantize(weight.flatten(0, -2), scheme, name, self.grams.get(name))
        return _Rounded(packed, tuple(weight.shape))


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


def quantized_weights(
    model: Model, scheme: Scheme, recipes: Mapping[str, Recipe], make: Make, threads: int
) -> tuple[dict[str, Tensor], Smoothed]:
    """Return the graph's quantized matrices by name, and what else is read of the model that they are part of.

    They are mapped from the cache folder; rounded now if they are not there.

    Args:
        model: whose matrices they are.
        scheme: how they are rounded.
        recipes: of the graph's weights.
        make: makes weights that are not quantized, as `weights.make`.
        threads: to compute on, if it must be seen what matrices multiply.
    """
    wanted = {_place(recipe): recipe for recipe in recipes.values() if is_quantized(recipe)}
    factors = [f"{_FACTORS}{site.name}" for site in sites(model.spec)] if scheme.smooths else []
    if model.load_format == "dummy":  # of which there is nothing to be seen
        found: Mapping[str, Tensor] = dict(_rounded(model, scheme, wanted))
    else:
        seeing = code_hash(Path(__file__).parent) if scheme.smooths else ""
        key = checkpoint_key(model, scheme, seeing)
        found = kept("onnx", key, [*wanted, *factors], lambda: dict(_rounded(model, scheme, wanted, make, threads)))
    smoothed = Smoothed(model.weights, {name.removeprefix(_FACTORS): found[name] for name in factors if name in found})
    return _by_name(found, recipes), smoothed


def is_quantized(recipe: Recipe) -> bool:
    """Whether a weight is a part of quantized matrices."""
    return recipe.form.split()[0] in ("codes", "scales", "zeros")


def _place(recipe: Recipe) -> str:
    """Return where a weight lies: an embedding that is the head too lies there once."""
    return " ".join([recipe.form.removesuffix(" flat"), *recipe.sources])


def _by_name(found: Mapping[str, Tensor], recipes: Mapping[str, Recipe]) -> dict[str, Tensor]:
    chosen = {name: (found[_place(recipe)], recipe.form) for name, recipe in recipes.items() if is_quantized(recipe)}
    return {name: each.flatten(1) if form.endswith("flat") else each for name, (each, form) in chosen.items()}


def _rounded(
    model: Model, scheme: Scheme, wanted: Mapping[str, Recipe], make: Make | None = None, threads: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is wanted, each with its place; with `make`, if the scheme smooths, as what is seen asks for."""
    sources = list(dict.fromkeys(source for recipe in wanted.values() for source in recipe.sources))
    with torch.inference_mode(), Reader(model.weights, torch.device("cpu"), torch.float32, sources) as reader:
        if make is None or not scheme.smooths:
            rounder = Rounder(reader.load, scheme)
            yield from ((name, rounder.part(recipe)) for name, recipe in wanted.items())
        else:
            log.warning(
                "%s: weights are rounded for the first time, by what the model makes of a text; this takes a while",
                model.reference,
            )
            seen = observed(model, lambda recipe, form: make(recipe, reader, form), threads)
            yield from _calibrated(model, scheme, wanted, seen)


def _calibrated(
    model: Model, scheme: Scheme, wanted: Mapping[str, Recipe], seen: Iterable[Inputs]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is wanted, and factors of what is evened out, part by part of the model."""
    spec, smoothed = model.spec, Smoothed(model.weights, {})
    rounder = Rounder(smoothed.load, scheme)
    for part, inputs in enumerate(seen):
        log.debug("rounding", extra={"part": part, "of": len(spec.layers) + 1})
        grams: dict[str, Gram] = {}
        for source, name in inputs.of.items():
            if name not in grams and (own := scheme.of(source, spec.tensors[source])) is not None:
                mean = inputs.means[name]
                factors = smoothed.even_out(source, mean.diagonal(), own.bits)
                grams[name] = Gram(mean if factors is None else mean / torch.outer(factors, factors))
        rounder.grams = {source: grams[name] for source, name in inputs.of.items() if name in grams}
        for place, recipe in wanted.items():
            if _part(recipe, len(spec.layers)) == part:
                yield place, rounder.part(recipe)
    yield from ((f"{_FACTORS}{name}", each) for name, each in smoothed.factors.items())


def _part(recipe: Recipe, layers: int) -> int:
    """Return with which part of the model, as `decoder.write_part` counts them, matrices are rounded."""
    kind, layer, *_ = recipe.sources[0].split(".")
    return int(layer) + 1 if kind == "layers" else layers + 1
