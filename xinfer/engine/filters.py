"""Temperature, min-p, top-k and top-p: from a row of logits to the tokens that may be drawn.

All rows of a step at once, and only as much of the vocabulary as their filters leave: a row with top-k never sorts more
than its k candidates. Weights are float64, so that a draw falls into the same interval on every device.
"""

__all__ = ["Candidates", "candidates", "largest", "largest_by_key"]

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xinfer.engine.transfer import send

_HEAD = 1024  # logits that are sorted at first where only top-p limits them


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
        top_k: [K] int64 on the host, from 1 to V, or None if no row has it.
        top_p: [K] float64, or None if no row has it.
        min_p: [K] float64, or None if no row has it.

    Returns:
        The candidates of every row. Of equal logits those with the lowest ids stay.
    """
    if top_k is None and top_p is None:
        return Candidates(None, _weights(logits, temperature, min_p))
    if top_k is None:
        assert top_p is not None
        return _nucleus(logits, temperature, top_p, min_p)
    values, ids = largest(logits, top_k)
    weights = _weights(values, temperature, min_p)
    places = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.where(places < send(top_k.numpy(), weights.device)[:, None], 0.0)
    if top_p is not None:
        mass = weights.cumsum(1)
        _cut(weights, mass, top_p[:, None] * mass[:, -1:])
    return _by_id(ids, weights)


def _nucleus(logits: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor | None) -> Candidates:
    """Filter by top-p alone: as many of the largest logits are sorted as are needed, which is seldom many.

    How many that are a device can't tell without being waited for, so it sorts all.
    """
    wanted = top_p[:, None] * _weights(logits, temperature, min_p).cumsum(1)[:, -1:]
    width = logits.shape[1]
    count = min(_HEAD, width) if logits.device.type == "cpu" else width
    while True:
        values, ids = largest(logits, torch.full((len(logits),), count))
        weights = _weights(values, temperature, min_p)
        mass = weights.cumsum(1)
        if count == width or bool((mass[:, -1:] >= wanted).all()):
            _cut(weights, mass, wanted)
            return _by_id(ids, weights)
        count = min(8 * count, width)


def _cut(weights: Tensor, mass: Tensor, wanted: Tensor) -> None:
    """Drop what comes after the mass that is wanted was reached; the likeliest token always stays."""
    weights[:, 1:].masked_fill_(mass[:, :-1] >= wanted, 0.0)


def _by_id(ids: Tensor, weights: Tensor) -> Candidates:
    ids, order = ids.sort(1)
    return Candidates(ids, weights.gather(1, order))


def _weights(logits: Tensor, temperature: Tensor, min_p: Tensor | None) -> Tensor:
    """Return exp((logit - largest) / temperature), and 0 for what is less likely than `min_p` times the likeliest.

    The largest of each row is 1, so nothing overflows.
    """
    wide = logits.double()
    weights = ((wide - wide.amax(1, keepdim=True)) / temperature[:, None]).exp_()
    return weights if min_p is None else weights.where(weights >= min_p[:, None], 0.0)


def largest(logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's `counts[k]` largest logits with their ids, by falling logit and then by rising id.

    `counts` is on the host. Rows are as wide as the largest count; what lies beyond a row's own count is in no
    particular order.
    """
    count, width = int(counts.max()), logits.shape[1]
    if count >= width:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    if logits.device.type != "cpu":
        return largest_by_key(logits, count)
    values, ids = logits.topk(count + 1, 1)
    # topk promises no order among equals: sort them by id, and where equals reach past what it returned, sort the row.
    order = torch.from_numpy(np.lexsort((ids.numpy(), -values.numpy())))  # half the time of two sorts by torch
    values, ids = values.gather(1, order), ids.gather(1, order)
    boundary = values.gather(1, (counts - 1)[:, None])[:, 0]
    for row in (boundary == values[:, -1]).nonzero()[:, 0].tolist():
        whole, whole_ids = logits[row].sort(descending=True, stable=True)
        values[row], ids[row] = whole[: count + 1], whole_ids[: count + 1]
    return values[:, :count], ids[:, :count]


def largest_by_key(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return as `largest` each row's `count` largest logits, in a number of steps that no value changes.

    A float's bits, those of negative ones turned, are whole numbers in the same order; with the id below them no two
    are equal, so that topk has no choice.
    """
    bits = (logits + 0.0).view(torch.int32)  # of which there is one zero
    last = logits.shape[1] - 1
    above = bits.where(bits >= 0, bits ^ 0x7FFFFFFF).long() << 32
    keys = above | (last - torch.arange(last + 1, device=logits.device))
    ids = last - (keys.topk(count, 1).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids
