"""A model's matrices, rounded; kept in the cache folder, since to round them well takes longer than to load."""

__all__ = ["quantized"]

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from xinfer.backends.torch.codes import Codes
from xinfer.backends.torch.observed import observed
from xinfer.models.kept import checkpoint_key, code_hash, kept
from xinfer.models.lazy import Lazy
from xinfer.models.model import Model
from xinfer.models.quantize import Gram, Scheme, quantize
from xinfer.models.reader import Reader

log = logging.getLogger(__name__)

_LAYOUT = ("codes", "quantized")  # what lies how in the file
_SEEING = ("observed", "decoder", "attention", "linear", "load", "mlp", "rotary")  # what tells how to round


def quantized(model: Model, scheme: Scheme, names: list[str]) -> Mapping[str, Codes]:
    """Return those of these matrices that are rounded, by canonical name; each is read when it is asked for.

    They are mapped from the cache folder, and rounded now if they are not there.
    """
    schemes = {name: own for name in names if (own := scheme.of(name, model.spec.tensors[name])) is not None}
    if model.load_format == "dummy":  # of which there is nothing to be seen
        return Lazy(schemes, lambda name: _codes(_of_dummy(model, name, schemes[name]), name, schemes[name], model))
    parts = [f"{part} {name}" for name, own in schemes.items() for part in _parts(own)]
    modules = (*_LAYOUT, *_SEEING) if scheme.method == "gptq" else _LAYOUT
    key = checkpoint_key(model, scheme, code_hash(Path(__file__).parent, modules))
    found = kept("torch", key, parts, lambda: dict(_made(model, scheme, schemes)))
    return Lazy(schemes, lambda name: _codes(found, name, schemes[name], model))


def _parts(scheme: Scheme) -> tuple[str, ...]:
    return ("codes", "scales") if scheme.symmetric else ("codes", "scales", "zeros")


def _codes(found: Mapping[str, Tensor], name: str, scheme: Scheme, model: Model) -> Codes:
    zeros = None if scheme.symmetric else found[f"zeros {name}"]
    columns = model.spec.tensors[name][-1]
    return Codes(found[f"codes {name}"], found[f"scales {name}"], zeros, scheme.bits, columns)


def _of_dummy(model: Model, name: str, scheme: Scheme) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(_round(model.weights.load(name), name, scheme, None))


def _made(model: Model, scheme: Scheme, schemes: Mapping[str, Scheme]) -> Iterator[tuple[str, Tensor]]:
    seen: Iterator[dict[str, Tensor]] = iter(())
    if scheme.method == "gptq":
        log.warning(
            "%s: weights are rounded for the first time, by what the model makes of a text; this takes a while",
            model.reference,
        )
        seen = observed(model)
    return _rounded(model, schemes, seen)


def _rounded(
    model: Model, schemes: Mapping[str, Scheme], seen: Iterator[dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of matrices; those of which inputs are told first, as they are."""
    left = dict(schemes)
    with torch.inference_mode(), Reader(model.weights, torch.device("cpu"), torch.float32, left) as reader:
        for means in seen:
            for name in means.keys() & left.keys():
                yield from _round(reader.load(name), name, left.pop(name), Gram(means[name]))
        for name, scheme in left.items():
            yield from _round(reader.load(name), name, scheme, None)


def _round(weight: Tensor, name: str, scheme: Scheme, gram: Gram | None) -> Iterator[tuple[str, Tensor]]:
    codes = Codes.of(quantize(weight.flatten(0, -2), scheme, name, gram), weight.shape)
    yield f"codes {name}", codes.codes
    yield f"scales {name}", codes.scales
    if codes.zeros is not None:
        yield f"zeros {name}", codes.zeros
