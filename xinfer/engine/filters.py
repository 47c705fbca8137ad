"""Temperature, min-p, top-k and top-p: from a row of logits to the tokens that may be drawn.

All rows of a step at once, and only as much of the vocabulary as their filters leave: a row with top-k never sorts more
than its k candidates. Weights are float64, so that a draw falls into the same interval on every device.
"""

__all__ = ["Candidates", "candidates", "largest"]

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn, by ascending id, with weights that need not add up to one.

    Attributes:
        ids: [K, C] int64, or None where the columns are the vocabulary itself.
        weights: [K, C] float64; zero for a token that the filters drop.
    """

    ids: Tensor | None
    weights: Tensor


def candidates(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Candidates:
    """Filter rows that use the same filters.

    Args:
        logits: [K, V] float32, finite or -inf, with at least one finite number a row.
        temperature: [K] float64, above zero.
        top_k: [K] int64 from 1 to V, or None if no row has it.
        top_p: [K] float64, or None if no row has it.
        min_p: [K] float64, or None if no row has it.

    Returns:
        The candidates of every row. Of equal logits those with the lowest ids stay.
    """
    if top_k is None and top_p is None:
        weights = _weights(logits, temperature)
        return Candidates(None, weights if min_p is None else weights.where(weights >= min_p[:, None], 0.0))
    values, ids = largest(logits, int(top_k.max()) if top_k is not None else logits.shape[1], top_k)
    weights = _weights(values, temperature)
    if min_p is not None:
        weights = weights.where(weights >= min_p[:, None], 0.0)
    if top_k is not None:
        weights = weights.where(torch.arange(weights.shape[1], device=weights.device) < top_k[:, None], 0.0)
    if top_p is not None:
        mass = weights.cumsum(1)
        missing = mass[:, :-1] < top_p[:, None] * mass[:, -1:]
        weights[:, 1:].masked_fill_(~missing, 0.0)  # the likeliest token always stays
    ids, order = ids.sort(1)
    return Candidates(ids, weights.gather(1, order))


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logit - largest) / temperature): the largest of each row is 1, so nothing overflows."""
    wide = logits.double()
    return ((wide - wide.amax(1, keepdim=True)) / temperature[:, None]).exp()


def largest(logits: Tensor, count: int, top_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of each row with their ids, by falling logit and then by rising id."""
    width = logits.shape[1]
    if count >= width or top_k is None:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count + 1, 1)
    # topk promises no order among equals: sort them by id, and where equals reach past what it returned, sort the row.
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    boundary = values.gather(1, (top_k - 1)[:, None])[:, 0]
    for row in (boundary == values[:, -1]).nonzero()[:, 0].tolist():
        whole, whole_ids = logits[row].sort(descending=True, stable=True)
        values[row], ids[row] = whole[: count + 1], whole_ids[: count + 1]
    return values[:, :count], ids[:, :count]
