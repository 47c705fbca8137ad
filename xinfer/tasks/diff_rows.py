"""What two computations of the same tokens differ by, place by place and layer by layer."""

__all__ = ["Layers", "Measured", "Place", "compared_layers", "compared_texts"]

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from xinfer.engine.decision import prepared
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.forcing import forced, forced_layers
from xinfer.engine.sampler import sample
from xinfer.engine.types import Sequence as Tokens
from xinfer.tasks.diff_sides import Side, Text
from xinfer.tasks.verdict import sequence_at

_TOP = 5
_LAYER_TOKENS = 256  # of the first text, by which layers are compared
# By how much of its size a layer's output may be off where nothing is wrong, by the coarser side's precision.
_ROUNDING = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15, "int8": 0.15, "int4": 0.5}

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a text: what both sides say comes after token `at`.

    Attributes:
        text: number of the text.
        at: of the token.
        token_id: that comes next in the text; None at its end.
        kl, kl_reverse: divergence of b from a, and of a from b, over the whole vocabulary, in nats.
        largest, mean: absolute differences of logits.
        likeliest: each side's token of the largest logit.
        chosen: the token that each side takes: the likeliest, or, in a text that was generated, what it draws.
        common: of each side's five likeliest tokens, how many are the other's too.
        nll: what the next token costs each side, in nats; None at the end.
        top: each side's likeliest tokens with their probabilities.
    """

    text: int
    at: int
    token_id: int | None
    kl: float
    kl_reverse: float
    largest: float
    mean: float
    likeliest: tuple[int, int]
    chosen: tuple[int, int]
    common: int
    nll: tuple[float, float] | None
    top: tuple[Top, Top]


@dataclass(frozen=True, slots=True)
class Layers:
    """How far apart the layers are.

    Attributes:
        apart: of what goes into each layer and out of the last: the norm of the difference over that of side a.
        rounding: what may be apart where nothing is wrong, by the precisions of the sides.
        differs: the first that is further apart than float32 rounds; None if none is. 0 is the embedding, N what comes
            out of layer N - 1.
        wrong: the first that is further apart than `rounding`; None if none is.
        steepest: where it grows by the largest factor.
    """

    apart: tuple[float, ...]
    rounding: float
    differs: int | None
    wrong: int | None
    steepest: int


@dataclass(slots=True)
class Measured:
    """All places, and what they come to."""

    places: list[Place] = field(default_factory=list)
    layers: Layers | None = None

    def figures(self) -> dict[str, float | int | None]:
        """Return means over all places: divergences in nats a token, agreement as shares."""
        places, scored = self.places, [place.nll for place in self.places if place.nll is not None]
        return {
            "places": len(places),
            "kl": _mean([place.kl for place in places]),
            "kl_reverse": _mean([place.kl_reverse for place in places]),
            "largest_difference": max(place.largest for place in places),
            "mean_difference": _mean([place.mean for place in places]),
            "top1": _mean([float(place.likeliest[0] == place.likeliest[1]) for place in places]),
            "top5": _mean([place.common / _TOP for place in places]),
            "chosen": _mean([float(place.chosen[0] == place.chosen[1]) for place in places]),
            "perplexity_a": math.exp(_mean([a for a, _ in scored])) if scored else None,
            "perplexity_b": math.exp(_mean([b for _, b in scored])) if scored else None,
        }

    @property
    def parting(self) -> Place | None:
        """The first place at which the sides take different tokens."""
        return next((place for place in self.places if place.chosen[0] != place.chosen[1]), None)


def compared_texts(a: Side, b: Side, texts: Sequence[Text]) -> Iterator[Place]:
    """Yield every place of every text, as both sides compute it; texts are computed in the same pieces on both."""
    engines = [side.session.engine(0, Observers()) for side in (a, b)]
    limits = [engine.scheduler.limits for engine in engines]
    tokens, rows = min(each.max_num_batched_tokens for each in limits), min(each.logits_rows for each in limits)
    common = replace(limits[0], max_num_batched_tokens=tokens, max_logits_rows=rows, max_num_seqs=1)
    width = min(engine.admission.vocab_size for engine in engines)
    for number, text in enumerate(texts):
        sequences = [_begun(engine, text) for engine in engines]
        at = text.first
        pieces = (forced(engine.runner, common, text.token_ids, text.first) for engine in engines)
        for pair in zip(*pieces, strict=True):
            yield from _places(number, text, at, [piece[:, :width].cpu() for piece in pair], engines, sequences)
            at += len(pair[0])


def _begun(engine: Engine, text: Text) -> Tokens | None:
    """Return the sequence of a text that was generated, as it was at its beginning."""
    return None if text.request is None else sequence_at(engine, text.request, 0, [])


def _places(
    number: int,
    text: Text,
    at: int,
    rows: list[Tensor],
    engines: Sequence[Engine],
    sequences: Sequence[Tokens | None],
) -> Iterator[Place]:
    """Yield the places of a piece, of which `rows` are the two sides' logits [n, V]."""
    logs = [each.double().log_softmax(1) for each in rows]
    divergences = [_kl(logs[one], logs[1 - one]) for one in (0, 1)]
    apart = (rows[0] - rows[1]).abs()
    best = [each.topk(min(_TOP, each.shape[1]), 1) for each in logs]
    for row in range(len(rows[0])):
        token = text.token_ids[at + row + 1] if at + row + 1 < len(text.token_ids) else None
        tops = [list(zip(b.indices[row].tolist(), b.values[row].exp().tolist(), strict=True)) for b in best]
        likeliest = [int(each[row].argmax()) for each in rows]
        drawn = [_drawn(e, each[row], s) for e, each, s in zip(engines, rows, sequences, strict=True)]
        chosen = [one if other is None else other for one, other in zip(likeliest, drawn, strict=True)]
        yield Place(
            number,
            at + row,
            token,
            kl=float(divergences[0][row]),
            kl_reverse=float(divergences[1][row]),
            largest=float(apart[row].max()),
            mean=float(apart[row].mean()),
            likeliest=(likeliest[0], likeliest[1]),
            chosen=(chosen[0], chosen[1]),
            common=len({t for t, _ in tops[0]} & {t for t, _ in tops[1]}),
            nll=None if token is None else (-float(logs[0][row, token]), -float(logs[1][row, token])),
            top=(tuple(tops[0]), tuple(tops[1])),
        )
        for sequence in sequences:
            if sequence is not None and token is not None:
                sequence.add(token)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of q from p, of log-probabilities [n, V]; where p is zero nothing counts."""
    terms = torch.where(p.isfinite(), p.exp() * (p - q), 0.0)
    return terms.sum(1)


def _drawn(engine: Engine, row: Tensor, sequence: Tokens | None) -> int | None:
    if sequence is None:
        return None
    changed = prepared(row, sequence, engine.sampler.processors)
    return sample(changed[None], [sequence])[0]


def compared_layers(a: Side, b: Side, text: Text) -> Layers | None:
    """Return how far apart the layers are on the beginning of a text; None if one of the sides does not tell them."""
    runners = [side.session.runner for side in (a, b)]
    if any("layers" not in runner.info.capabilities for runner in runners):
        return None
    most = min(side.session.limits.max_num_batched_tokens for side in (a, b))
    told = [forced_layers(runner, text.token_ids[: min(_LAYER_TOKENS, most)]) for runner in runners]
    apart = tuple(float((x - y).norm() / x.norm()) for x, y in zip(*told, strict=True))
    rounding = max(_ROUNDING[side.precision] for side in (a, b))
    differs, wrong = (
        next((index for index, each in enumerate(apart) if not each <= bound), None)
        for bound in (_ROUNDING["float32"], rounding)
    )
    growth = [later / max(earlier, 1e-9) for earlier, later in pairwise(apart)]
    return Layers(apart, rounding, differs, wrong, 1 + max(range(len(growth)), key=growth.__getitem__))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
