"""The inputs of a model's matrices, told layer by layer: each is computed by itself, in float32, on a text.

So of a model that is rounded because it is large no more than a layer need be in memory as it was.
"""

__all__ = ["Inputs", "observed"]

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends.onnx.decoder import write_part
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.providers import CPU
from xinfer.backends.onnx.recipe import Recipe
from xinfer.backends.onnx.session import open_session
from xinfer.backends.onnx.texts import Call, call
from xinfer.models.model import Model
from xinfer.models.windows import windows

_WINDOW = 512  # tokens of a window, or what the model can take


@dataclass(frozen=True, slots=True)
class Inputs:
    """What matrices of a part of a model multiply.

    Attributes:
        means: [in, in], the mean of x' x over inputs x [1, in], by name.
        of: of each matrix by its canonical name, which of them.
    """

    means: dict[str, Tensor]
    of: dict[str, str]


def observed(model: Model, make: Callable[[Recipe, Form], Tensor], threads: int) -> Iterator[Inputs]:
    """Yield what the matrices of each part of a model multiply; the parts are those of `write_part`.

    Args:
        model: whose text and spec it is.
        make: makes a weight of the graph.
        threads: to compute on.
    """
    spec = model.spec
    form = Form(min(_WINDOW, spec.max_model_len))
    texts = [call(spec, tokens) for tokens in windows(model, form.max_len)]
    for part in range(len(spec.layers) + 2):
        graph, recipes, watched = write_part(spec, form, part)
        weights = {name: make(recipe, form) for name, recipe in recipes.items()}
        session = open_session(ir.to_proto(graph).SerializeToString(), weights, [(CPU, {})], threads)
        sums: dict[str, NDArray[np.float32]] = {}
        for each in texts:
            _compute(session, each, sums)
        del session, weights  # its threads would spin beside those that round
        tokens = len(texts) * form.max_len
        yield Inputs({name: torch.from_numpy(each[0] / tokens) for name, each in sums.items()}, watched)


def _compute(session: ort.InferenceSession, text: Call, sums: dict[str, NDArray[np.float32]]) -> None:
    """Compute a window's part: what comes out goes in next, what is told of inputs is added to the sums."""
    taken = {each.name for each in session.get_inputs()}
    told = [name for each in session.get_outputs() if not (name := each.name).startswith("present.")]
    found = session.run(told, {name: each for name, each in text.items() if name in taken})
    for name, each in zip(told, found, strict=True):
        if name == "next":
            text["hidden"] = each
        else:
            sums[name] = sums[name] + each if name in sums else each
