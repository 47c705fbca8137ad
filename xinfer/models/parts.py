"""What a model's weights are for, and how much of them each part has: from its spec and its files' headers alone."""

__all__ = ["Part", "parts"]

import math
from collections import Counter
from dataclasses import dataclass

from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Weights

_NAMES = ("embedding", "attention", "feed-forward", "router", "experts", "norms", "head")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a decoder, over all layers.

    Attributes:
        name: embedding (tables of which a token needs a row), attention, feed-forward (what computes every token, a
            shared expert too), router, experts (those that are chosen from), norms, head. A tied head is no part.
        parameters: numbers learned.
        active_parameters: of those, what one token needs: of experts those chosen, of all else everything.
        weight_bytes: in the precision to compute in.
        stored_bytes: in the files, by the format's name of how they are stored; empty where there are no files.
    """

    name: str
    parameters: int
    active_parameters: int
    weight_bytes: int
    stored_bytes: dict[str, int]


def parts(spec: DecoderSpec, element: int, weights: Weights | None = None) -> list[Part]:
    """Return the parts that a decoder has, in a precision of so many bytes a number.

    A stored tensor that holds several canonical ones counts for the part of the first. Nothing is read.
    """
    parameters, active, sizes = Counter[str](), Counter[str](), Counter[str]()
    stored: dict[str, Counter[str]] = {name: Counter() for name in _NAMES}
    for name, shape in spec.tensors.items():
        part, count = _part(name), math.prod(shape)
        parameters[part] += count
        sizes[part] += count * (4 if spec.keeps_precision(name) else element)
        active[part] += count if part != "experts" else count // shape[0] * _chosen(spec, name)
    for name, kind, size in weights.stored() if weights is not None else ():
        stored[_part(name)][kind] += size
    return [
        Part(name, parameters[name], active[name], sizes[name], dict(stored[name].most_common()))
        for name in _NAMES
        if parameters[name]
    ]


def _part(canonical: str) -> str:
    """Return the part that a tensor belongs to, by its canonical name (see `DecoderSpec.tensors`)."""
    place = canonical.split(".")[2:] if canonical.startswith("layers.") else canonical.split(".")
    if any(word.endswith("norm") for word in place):
        return "norms"
    match place:
        case ["embed" | "positions", *_]:
            return "embedding"
        case ["head", *_]:
            return "head"
        case ["attn", *_]:
            return "attention"
        case ["mlp", "router" | "shared_gate", *_]:
            return "router"
        case ["mlp", "experts", *_]:
            return "experts"
    return "feed-forward"


def _chosen(spec: DecoderSpec, canonical: str) -> int:
    experts = spec.layers[int(canonical.split(".")[1])].mlp.experts
    return 0 if experts is None else experts.chosen
