"""How a weight of the graph is made from the model's."""

__all__ = ["Recipe"]

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `weights.make` does.

    Attributes:
        form: what is done, such as `rows` (matrices of the same input, one below the other).
        sources: canonical names of tensors.
        layer: the layer whose spec says the rest, where the form needs it.
    """

    form: str
    sources: tuple[str, ...] = ()
    layer: int | None = None
