"""The graph's weights, made from the model's by their recipes."""

__all__ = ["made", "make"]

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.quantized import Rounder, quantized_weights
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.model import Model
from xinfer.models.reader import Reader
from xinfer.models.spec import AttentionSpec


def made(model: Model, recipes: Mapping[str, Recipe], form: Form, threads: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield each of a graph's weights with its name, in the graph's order; see `quantized_weights` for threads."""
    quantized: dict[str, Tensor] = {}
    weights = model.weights
    if form.scheme is not None:
        quantized, weights = quantized_weights(model, form.scheme, recipes, make, threads)
    others = {name: recipe for name, recipe in recipes.items() if name not in quantized}
    sources = list(dict.fromkeys(source for recipe in others.values() for source in recipe.sources))
    with torch.inference_mode(), Reader(weights, torch.device("cpu"), _dtype(form), sources) as reader:
        for name, recipe in recipes.items():
            if (tensor := quantized.get(name)) is None:
                yield name, make(recipe, reader, form)
            else:  # codes, or scales in the precision of activations
                yield name, tensor.to(_dtype(form)) if tensor.is_floating_point() else tensor


def make(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """Return a weight of the graph, on the CPU; a view of the checkpoint's where it lies there as it is needed."""
    kind = recipe.form.partition(" ")[0]
    made = FORMS[kind](recipe, weights, form)
    return (made.flatten(1) if recipe.form.endswith(" flat") else made).contiguous()


def _dtype(form: Form) -> torch.dtype:
    found: torch.dtype = getattr(torch, form.dtype)
    return found


def _attention(recipe: Recipe, weights: Reader) -> AttentionSpec:
    assert recipe.layer is not None
    return weights.spec.layers[recipe.layer].attention


def _rows(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`rows`: tensors, one below the other."""
    tensors = [weights.load(name).to(_dtype(form)) for name in recipe.sources]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _float(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`float`: a tensor that is float32 in any precision."""
    return weights.load(recipe.sources[0]).float()


def _interleaved(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`interleaved`: of experts, [count, rows, ...] tensors of the same input, their rows in turns."""
    tensors = [weights.load(name).to(_dtype(form)) for name in recipe.sources]
    return torch.stack(tensors, 2).flatten(1, 2)


def _plus(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`plus N`: a tensor with N added to it."""
    return (weights.load(recipe.sources[0]).float() + float(recipe.form.split()[1])).to(_dtype(form))


def _per_head(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`per_head` and `per_head turned`: of latent attention, [heads, in, out] of each head."""
    spec = _attention(recipe, weights)
    assert spec.latent is not None
    tensor = weights.load(recipe.sources[0]).to(_dtype(form)).view(spec.heads, -1, spec.latent.rank)
    return tensor.transpose(1, 2) if recipe.form.endswith("turned") else tensor


def _turn(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`cos` and `sin` [max_len, dim / 2], and `growth` [max_len, 1], a factor on queries: of each position."""
    rope = _attention(recipe, weights).rope
    assert rope is not None
    if recipe.form == "growth":
        contexts = torch.arange(form.max_len) // rope.original_max_len
        return (1 + rope.query_growth * (1 + contexts).log()).to(_dtype(form))[:, None]
    angles = np.arange(form.max_len, dtype=np.float32)[:, None] * rope.inverse_frequencies(form.max_len)
    wave = (np.cos if recipe.form == "cos" else np.sin)(angles) * np.float32(rope.amplitude)
    return torch.from_numpy(wave).to(_dtype(form))


def _rounded(recipe: Recipe, weights: Reader, form: Form) -> Tensor:
    """`codes`, `scales`, `zeros`: see `Rounder`."""
    assert form.scheme is not None
    return Rounder(weights.load, form.scheme).part(recipe)


FORMS: dict[str, Callable[[Recipe, Reader, Form], Tensor]] = {
    "rows": _rows,
    "float": _float,
    "interleaved": _interleaved,
    "plus": _plus,
    "per_head": _per_head,
    "cos": _turn,
    "sin": _turn,
    "growth": _turn,
    "codes": _rounded,
    "scales": _rounded,
    "zeros": _rounded,
}
