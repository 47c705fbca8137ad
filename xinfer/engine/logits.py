"""What is done to rows of logits before temperature: plugins' processors, penalties, bias, masks, in this order.

All rows of a step at once, touching only the rows and tokens that a request names; where none does, nothing is copied.
"""

__all__ = ["LogitsProcessor", "adjust", "asks", "check", "counted"]

import math
from collections import Counter
from collections.abc import Sequence as Rows
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from xinfer.engine.types import Request, Sequence
from xinfer.errors import RequestError


class LogitsProcessor(Protocol):
    """Changes logits before tokens are chosen, all rows of a step at once. A request asks for it by name in `extra`."""

    name: str

    def check(self, arguments: Any) -> None:
        """Refuse a request's `extra[name]` with a `RequestError`; called when the request is added."""

    def apply(self, logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
        """Return logits [K, V] for these K sequences; rows whose request did not ask must stay as they are."""


def asks(request: Request) -> bool:
    """Whether a request's parameters change logits at all."""
    p = request.params
    masks = p.allowed_token_ids is not None or request.bad_words or p.min_tokens
    return bool(p.penalizes or p.logit_bias or masks)


def counted(request: Request) -> Counter[int] | None:
    """Return how often each token of the prompt occurs in the output, which is not yet, for penalties to be kept."""
    return Counter(dict.fromkeys(request.prompt_token_ids, 0)) if request.params.penalizes else None


def check(request: Request, vocab_size: int) -> None:
    """Refuse ids that are no tokens, and masks that leave nothing."""
    p = request.params
    for name, ids in (("logit_bias", p.logit_bias), ("allowed_token_ids", p.allowed_token_ids or ())):
        for token in ids:
            if token >= vocab_size:
                raise RequestError(
                    f"{name} names token {token}, but the vocabulary has {vocab_size} (0 to {vocab_size - 1})"
                )
    banned = {word[0] for word in request.bad_words if len(word) == 1} | _ends(request, 0)
    allowed = range(vocab_size) if p.allowed_token_ids is None else p.allowed_token_ids
    if banned and all(token in banned for token in allowed):
        raise RequestError(
            "bad_words and min_tokens forbid every token that allowed_token_ids allows: loosen one of them"
        )


def adjust(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Return logits [K, V] as the K requests' parameters change them: a copy, or the same where none does."""
    rows = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.adjusts]
    if not rows:
        return logits
    out = logits.clone()
    _penalize(out, [(row, s) for row, s in rows if s.counts])
    for row, sequence in rows:
        if bias := sequence.request.params.logit_bias:
            out[row, _index(out, list(bias))] += torch.tensor(list(bias.values()), dtype=out.dtype, device=out.device)
        if (allowed := sequence.request.params.allowed_token_ids) is not None:
            ids = _index(out, allowed)
            kept = out[row, ids]
            out[row] = -math.inf
            out[row, ids] = kept
    _ban(out, [(row, token) for row, sequence in rows for token in _banned(sequence)])
    return out


def _penalize(out: Tensor, rows: list[tuple[int, Sequence]]) -> None:
    """Repetition first (Keskar et al., "CTRL", 2019: divide positive logits, multiply negative ones), then the rest."""
    if not rows:
        return
    counts = [s.counts or Counter() for _, s in rows]
    lengths = [len(c) for c in counts]

    def spread(values: list[float]) -> Tensor:
        """One number of each row for all of its tokens."""
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(out.device)

    at = (
        torch.from_numpy(np.repeat(np.array([row for row, _ in rows]), lengths)).to(out.device),
        _index(out, [token for c in counts for token in c]),
    )
    times = torch.tensor([n for c in counts for n in c.values()], dtype=torch.float32, device=out.device)
    params = [s.request.params for _, s in rows]
    repetition = spread([p.repetition_penalty for p in params])
    values = out[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([p.frequency_penalty for p in params]) * times
    values -= spread([p.presence_penalty for p in params]) * (times > 0)
    out[at] = values


def _banned(sequence: Sequence) -> set[int]:
    """Return the tokens that can't come next: those that would complete a bad word, and ends that come too early."""
    banned = _ends(sequence.request, len(sequence.token_ids) - sequence.num_prompt)
    for word in sequence.request.bad_words:
        before = len(word) - 1
        if not before or sequence.output_token_ids[-before:] == list(word[:-1]):
            banned.add(word[-1])
    return banned


def _ends(request: Request, generated: int) -> set[int]:
    early = generated < request.params.min_tokens
    return set(request.eos_token_ids) | set(request.params.stop_token_ids) if early else set()


def _ban(out: Tensor, tokens: list[tuple[int, int]]) -> None:
    places = [(row, token) for row, token in tokens if token < out.shape[1]]
    if places:
        rows, columns = zip(*places, strict=True)
        out[_index(out, rows), _index(out, columns)] = -math.inf


def _index(like: Tensor, values: Rows[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
