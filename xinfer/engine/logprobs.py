"""Log-probabilities of tokens, their ranks, and the likeliest tokens beside them."""

__all__ = ["MODES", "describe", "values_of"]

import math
from collections.abc import Iterator
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from xinfer.engine.filters import largest
from xinfer.engine.types import TokenLogprobs

# What is told of a token: the model's own, or what it was drawn from; log-probabilities or the logits themselves.
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def values_of(logits: Tensor, mode: str) -> Tensor:
    """Return what is told of rows of logits [K, V]: a row's values depend on that row alone, bit for bit."""
    return torch.log_softmax(logits, 1) if mode.endswith("logprobs") else logits


def describe(values: Tensor, tokens: Rows[int], tops: Rows[int]) -> list[TokenLogprobs]:
    """Return one entry for each row of values [K, V]: its token's, and those of its `tops[k]` likeliest tokens.

    Of equal values the lowest id comes first among the likeliest; a rank counts only what is strictly likelier.
    """
    ids = torch.tensor(tokens, device=values.device)[:, None]
    chosen = values.gather(1, ids)
    ranks = ((values > chosen).sum(1) + 1).tolist()
    most = min(max(tops, default=0), values.shape[1])
    best = largest(values, torch.full((len(tokens),), most)) if most else None
    best_values, best_ids = (best[0].tolist(), best[1].tolist()) if best else ([[]] * len(tokens), [[]] * len(tokens))
    return [
        TokenLogprobs(token, value, rank, tuple(_possible(top_ids[:top], top_values[:top])))
        for token, value, rank, top, top_ids, top_values in zip(
            tokens, chosen[:, 0].tolist(), ranks, tops, best_ids, best_values, strict=True
        )
    ]


def _possible(ids: list[int], values: list[float]) -> Iterator[tuple[int, float]]:
    """Yield the tokens that can come at all: of the others there is no number to tell."""
    return ((token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf)
