"""Scales of a cache in int8, one a channel of each key head: the largest keys and values that a text comes to.

The operator rounds what it appends to whole numbers of a scale, up to 127 of them, and takes scales as weights. So the
model computes a text once with a cache in float32, in windows, each from an empty context.
"""

__all__ = ["is_scale", "kv_scales"]

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends.onnx.cached import graph_for, graph_key
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.recipe import Recipe
from xinfer.backends.onnx.texts import call
from xinfer.models.kept import checkpoint_key, kept
from xinfer.models.model import Model
from xinfer.models.spec import RopeSpec
from xinfer.models.windows import windows

_WINDOW, _WINDOWS = 256, 6
_MARGIN = 1.1  # by how much other texts may be beyond this one


def is_scale(recipe: Recipe) -> bool:
    """Whether a weight is a scale of the cache."""
    return recipe.form.startswith("kv_scale ")


def kv_scales(
    model: Model,
    form: Form,
    recipes: Mapping[str, Recipe],
    weights: Mapping[str, Tensor],
    open_graph: Callable[[Path, Mapping[str, Tensor]], ort.InferenceSession],
) -> Mapping[str, Tensor]:
    """Return the scales that a graph wants, float32 [G * width] by name, from the cache folder if they are there.

    Args:
        model: whose weights the graph has.
        form: of the graph, whose cache is int8.
        recipes: of the graph's weights.
        weights: the graph's, all but scales.
        open_graph: opens a graph with weights.
    """
    wanted = {name: recipe for name, recipe in recipes.items() if is_scale(recipe)}
    size = min(_WINDOW, form.max_len)

    def measured() -> dict[str, Tensor]:
        path, _ = graph_for(model.spec, replace(form, kv_dtype=form.dtype))
        largest = _largest(open_graph(path, weights), model, size)
        found = {
            name: largest[f"present.{recipe.layer}.{recipe.form.split()[1]}"].ravel() for name, recipe in wanted.items()
        }
        return {name: torch.from_numpy(each * (_MARGIN / 127)).clamp(min=1e-12) for name, each in found.items()}

    if model.load_format == "dummy":
        return measured()
    turns = any(
        layer.attention.rope is not None and layer.attention.rope.depends_on_length for layer in model.spec.layers
    )
    graph = graph_key(model.spec, form if turns else replace(form, max_len=size))
    return kept("onnx", checkpoint_key(model, graph), wanted, measured)


def _largest(session: ort.InferenceSession, model: Model, size: int) -> dict[str, NDArray[np.float32]]:
    """Return of each output of the cache, by name, the largest absolute values [G, width]."""
    inputs = {each.name for each in session.get_inputs()}
    names = [f"present.{index}.{part}" for index in range(len(model.spec.layers)) for part in ("key", "value")]
    largest: dict[str, NDArray[np.float32]] = {}
    for tokens in windows(model, size, _WINDOWS):
        feeds = {name: each for name, each in call(model.spec, tokens).items() if name in inputs}
        caches = session.run(names, feeds)
        for index, layer in enumerate(model.spec.layers):
            caches[2 * index] = _turned(caches[2 * index], layer.attention.rope, model.spec.max_model_len)
        for name, cache in zip(names, caches, strict=True):
            found = np.abs(cache[0]).max(1)
            largest[name] = np.maximum(largest.get(name, found), found)
    return largest


def _turned(keys: NDArray[np.float32], rope: RopeSpec | None, longest: int) -> NDArray[np.float32]:
    """Return keys [1, G, T, width] as large as they get at any position of contexts up to the longest.

    Of two channels that are turned together each may come to be as long as both. Slow ones don't turn that far.
    """
    if rope is None:
        return keys
    pairs = np.arange(rope.dim).reshape((-1, 2) if rope.interleaved else (2, -1))
    first, second = pairs.T if rope.interleaved else pairs
    reach = rope.inverse_frequencies(longest) * longest
    x, y = np.abs(keys[..., first]), np.abs(keys[..., second])
    length, keys = np.hypot(x, y), keys.copy()
    keys[..., first] = length * np.cos(np.maximum(np.arctan2(y, x) - reach, 0))
    keys[..., second] = length * np.cos(np.maximum(np.arctan2(x, y) - reach, 0))
    return keys
