"""Checkpoints with quantized weights, read as if they were not: what config.json calls `quantization_config`.

One module for each scheme has `weights(source, config)`, which finds a checkpoint's quantized weights by the names of
their tensors and checks the shapes, and `describe(config)`. Nothing here keeps a weight packed yet.
"""

__all__ = ["dequantized", "describe", "without_unused_biases"]

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantized import awq, compressed_tensors, fp8, gptq, mxfp4
from xinfer.models.quantized._config import Config
from xinfer.models.quantized._stored import Quantized
from xinfer.models.weights import Tensors


class _Scheme(Protocol):
    def weights(self, source: Tensors, config: Config) -> dict[str, Quantized]: ...

    def describe(self, config: Config) -> str: ...


_SCHEMES: dict[str, _Scheme] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def dequantized(tensors: Tensors, quantization_config: Config) -> Tensors:
    """Return a checkpoint's tensors with plain names (`...q_proj.weight`), dequantized when read.

    Args:
        tensors: as they are stored (`...q_proj.qweight`, `...q_proj.scales`, ...).
        quantization_config: what the checkpoint says of them, with `quant_method`.

    A weight has the shape [out, in], that of gpt-oss's experts [experts, in, out], and is float32; what is not
    quantized is passed through. Values are exact where scales are stored in half precision, else rounded once. Shapes
    are checked here; apart from tensors that say shapes, none is read before it is asked for, and reading one takes
    little more memory than its result and, twice, its parts. A scheme that is not supported, and parts that are missing
    or do not fit, are a `ModelError`.
    """
    method, scheme = _scheme(quantization_config)
    found = scheme.weights(tensors, quantization_config)
    parts = {part for weight in found.values() for part in weight.parts}
    shapes = {name: shape for name, shape in tensors.shapes.items() if name not in parts}
    kinds = {name: kind for name, kind in tensors.kinds.items() if name not in parts}
    for name, weight in found.items():
        if name in shapes:
            raise ModelError(f"tensor {name!r} is there both as it is and quantized with {method}: only one may be")
        shapes[name] = weight.shape
        kinds[name] = method, sum(tensors.kinds[part][1] for part in weight.parts if part in tensors.kinds)

    def load(name: str) -> Tensor:
        if name in found:
            return found[name].load()
        tensor = tensors.load(name)
        if tensor.dtype not in _PLAIN:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name!r} holds {kind}, but none of {method}'s scales is beside it: it is damaged")
        return tensor

    return Tensors(shapes, load, tensors.files, kinds)


def describe(quantization_config: Config) -> str:
    """Return what a checkpoint's weights are, for a note to the user: `4-bit GPTQ weights`."""
    return _scheme(quantization_config)[1].describe(quantization_config)


def without_unused_biases(tensors: Tensors, needed: Callable[[str], bool]) -> Tensors:
    """Leave out biases that are not needed and are all 0: AutoGPTQ gives every module one, whether it had any or not.

    Only the values of those that are not needed are read.
    """

    def unused(name: str) -> bool:
        vector = name.endswith(".bias") and len(tensors.shapes[name]) == 1
        return vector and not needed(name) and not bool(tensors.load(name).any())

    shapes = {name: shape for name, shape in tensors.shapes.items() if not unused(name)}
    return Tensors(shapes, tensors.load, tensors.files, tensors.kinds)


def _scheme(config: Config) -> tuple[str, _Scheme]:
    """Return the scheme that a config names; one that is not supported is a `ModelError`."""
    method: Any = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # its first checkpoints don't name it
    if not isinstance(method, str) or method not in _SCHEMES:
        raise ModelError(
            f"quantization_config: quant_method={method!r} is not supported "
            f"(supported: {', '.join(_SCHEMES)}): take another checkpoint of the model"
        )
    return method, _SCHEMES[method]
