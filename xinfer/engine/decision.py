"""Why a token came, and how little would have had to change for another one to come.

A row of logits differs a little between backends, precisions and machines. If no logit changes by more than some c, a
candidate's weight changes by a factor of at most exp(c / temperature), and a logit passes another only where they are
no further apart than 2c. So for every c there are tokens that surely come, and tokens that possibly come: of these
bounds, and of nothing else, margins are made.
"""

__all__ = ["Decision", "Stage", "decide", "prepared", "reach", "stages"]

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.engine.filters import Candidates, candidates
from xinfer.engine.logits import LogitsProcessor, adjust
from xinfer.engine.random import uniform
from xinfer.engine.sampler import pick
from xinfer.engine.types import SamplingParams, Sequence

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

_MOST = 64.0  # a change of logits beyond which nothing is told apart
_PRECISE = 1e-6  # of a margin, relative
_NOTHING = -30.0  # exponent of a weight that counts for nothing: all of a vocabulary's such are no part of a million


@dataclass(frozen=True, slots=True)
class Decision:
    """A token that came, and what it depended on.

    Attributes:
        token_id: the token.
        u: the number drawn for it, in [0, 1); None where the likeliest is taken.
        interval: the part of [0, 1) that was the token's; None likewise.
        margin: as long as no logit changes by this much, the same token comes.
        instead: the token that comes first if they do; None where there is no other.
    """

    token_id: int
    u: float | None
    interval: tuple[float, float] | None
    margin: float
    instead: int | None


@dataclass(frozen=True, slots=True)
class Stage:
    """What could come after one stage of sampling.

    Attributes:
        name: of the stage.
        kept: tokens that can still come.
        top: the likeliest of them: id, logit, and probability among those kept.
    """

    name: str
    kept: int
    top: tuple[tuple[int, float, float], ...]


def prepared(logits: Tensor, sequence: Sequence, processors: Rows[LogitsProcessor] = ()) -> Tensor:
    """Return a row of logits [V] as temperature gets it: after plugins' processors, penalties, bias and masks."""
    rows = logits[None]
    for processor in processors:
        rows = processor.apply(rows, [sequence])
    return adjust(rows, [sequence])[0]


def decide(row: Tensor, sequence: Sequence) -> Decision:
    """Return the token that a prepared row [V] gives the sequence next, and what it depends on."""
    bounds = _Bounds(row, sequence)
    token = bounds.token()
    margin = _least(lambda change: not bounds.sure(token, change))
    return Decision(token, bounds.u, bounds.interval(token), margin, bounds.other(token, margin))


def reach(row: Tensor, sequence: Sequence, token: int) -> float:
    """Return by how much at least some logit must change for `token` to come; infinite where a mask forbids it."""
    bounds = _Bounds(row, sequence)
    return _least(lambda change: bounds.possible(token, change))


def stages(logits: Tensor, row: Tensor, sequence: Sequence, top: int = 5) -> list[Stage]:
    """Return what could come after each stage, from the model's own logits [V] and the prepared row."""
    params, found = sequence.request.params, [_stage("model", logits.double(), None, top)]
    if not torch.equal(logits, row):
        found.append(_stage("penalties, bias, masks", row.double(), None, top))
    if params.greedy:
        return [*found, _stage("greedy", row.double(), 1, top)]
    scaled = row.double() / params.temperature
    found.append(_stage(f"temperature {params.temperature:g}", scaled, None, top))
    used = SamplingParams(temperature=params.temperature)
    for name in ("min_p", "top_k", "top_p"):
        value: Any = getattr(params, name)
        if value != getattr(used, name) and value != -1:
            used = replace(used, **{name: value})
            kept = int((_kept(row, used).weights > 0).sum())
            found.append(_stage(f"{name.replace('_', '-')} {value:g}", scaled, kept, top))
    return found


def _stage(name: str, values: Tensor, kept: int | None, top: int) -> Stage:
    """Return a stage at which the first `kept` tokens by rank are left; None for all that are not masked."""
    order = values.argsort(descending=True, stable=True)[: kept or int(values.isfinite().sum())]
    probabilities = values[order].softmax(0)
    best = zip(order[:top].tolist(), values[order[:top]].tolist(), probabilities[:top].tolist(), strict=True)
    return Stage(name, len(order), tuple(best))


def _kept(row: Tensor, params: SamplingParams) -> Candidates:
    """Return the candidates of one row, as the sampler has them."""
    one = torch.ones(1, dtype=torch.float64, device=row.device)
    return candidates(
        row[None],
        one * params.temperature,
        torch.tensor([params.top_k]) if 0 < params.top_k < len(row) else None,
        one * params.top_p if params.top_p < 1 else None,
        one * params.min_p if params.min_p > 0 else None,
    )


class _Bounds:
    """What may come of a row, if each of its logits changes by at most so much.

    Tokens are held by rank, and only those that have any weight.
    """

    def __init__(self, row: Tensor, sequence: Sequence) -> None:
        self.params, self.row = sequence.request.params, row
        values = row.double().cpu().numpy()
        order = np.argsort(-values, kind="stable")
        values = values[order]
        temperature = self.params.temperature or 1.0
        heights = (values - values[0]) / temperature
        used = max(int(np.searchsorted(-heights, -_NOTHING, side="right")), 2)
        used = max(used, min(self.params.top_k + 1, len(values))) if self.params.top_k > 0 else used
        self.ids, self.values = order[:used], values[:used]
        self.weights = np.exp(heights[:used])
        self.u: float | None = None
        if not self.params.greedy:
            place = len(sequence.token_ids)
            self.u = float(uniform([sequence.request.seed], [place], [sequence.sample])[0])

    def token(self) -> int:
        """Return the token that comes of the row as it is."""
        if self.u is None:
            return int(self.ids[0])
        return int(pick(_kept(self.row, self.params), torch.tensor([self.u], dtype=torch.float64)))

    def interval(self, token: int) -> tuple[float, float] | None:
        """Return which part of [0, 1) is a token's."""
        if self.u is None:
            return None
        kept = _kept(self.row, self.params)
        weights = kept.weights[0]
        ids = torch.arange(len(weights)) if kept.ids is None else kept.ids[0]
        total = float(weights.sum())
        return float(weights[ids < token].sum()) / total, float(weights[ids <= token].sum()) / total

    def sure(self, token: int, change: float) -> bool:
        """Whether a token comes whatever changes of this size there are."""
        if self.u is None:
            return bool(self.ids[0] == token) and (len(self.ids) == 1 or self.values[0] - self.values[1] > 2 * change)
        sure, possible = self._kept(change)
        if not sure[self.ids == token].any():
            return False
        factor = self._factor(change)
        low = _share(self._mass(possible, self.ids < token), self._mass(sure, self.ids >= token), factor)
        high = _share(self._mass(sure, self.ids <= token), self._mass(possible, self.ids > token), 1 / factor)
        return low <= self.u < high

    def possible(self, token: int, change: float) -> bool:
        """Whether a token comes for some changes of this size."""
        own = self.ids == token
        if not own.any():
            return False
        if self.u is None:
            return bool(self.values[own][0] + 2 * change >= self.values[0])
        sure, possible = self._kept(change)
        if not possible[own].any():
            return False
        factor = self._factor(change)
        low = _share(self._mass(sure, self.ids < token), self._mass(possible, self.ids >= token), 1 / factor)
        high = _share(self._mass(possible, self.ids <= token), self._mass(sure, self.ids > token), factor)
        return low <= self.u < high

    def other(self, token: int, change: float) -> int | None:
        """Return the likeliest of the other tokens that may come for such a change."""
        if math.isinf(change):
            return None
        slightly = change * (1 + 2 * _PRECISE) + 1e-12
        return next((int(t) for t in self.ids if t != token and self.possible(int(t), slightly)), None)

    def _kept(self, change: float) -> tuple[Mask, Mask]:
        """Return which tokens the filters keep for all changes of this size, and which for some."""
        p, gap, values = self.params, 2 * change, self.values
        sure = np.ones(len(values), np.bool_)
        possible = values > -math.inf
        if 0 < p.top_k < len(values):
            sure &= values - gap > values[p.top_k]
            possible &= values + gap >= values[p.top_k - 1]
        if p.min_p > 0:
            floor = values[0] + p.temperature * math.log(p.min_p)
            sure &= values - gap >= floor
            possible &= values + gap >= floor
        if p.top_p < 1:
            mass = np.concatenate([[0.0], self.weights.cumsum()])
            ahead = np.searchsorted(-values, gap - values, side="right")  # tokens that may be ahead, and itself
            behind = np.searchsorted(-values, -gap - values, side="left")  # tokens that are ahead for sure
            most = (mass[ahead] - self.weights) / max(self._mass(sure), self.weights[0])
            least = mass[behind] / self._mass(possible)
            factor = self._factor(change)
            sure &= _shifted(np.minimum(most, 1.0), factor) < p.top_p
            possible &= _shifted(np.minimum(least, 1.0), 1 / factor) < p.top_p
            possible[0] = True
        return sure, possible

    def _mass(self, kept: Mask, which: Mask | None = None) -> float:
        return float(self.weights[kept if which is None else kept & which].sum())

    def _factor(self, change: float) -> float:
        """Return by how much at most the weights of some grow against those of others."""
        return math.exp(2 * change / self.params.temperature)


def _share(part: float, rest: float, factor: float) -> float:
    """Return the share of a part that has grown by a factor against the rest."""
    return part * factor / (part * factor + rest) if part else 0.0


def _shifted(shares: Numbers, factor: float) -> Numbers:
    """Return shares [N] of parts that have grown by a factor against their rests."""
    return shares * factor / (shares * factor + 1 - shares)


def _least(holds: Callable[[float], bool]) -> float:
    """Return the least change from which on something holds, by bisection; infinite if it never does."""
    if holds(0.0):
        return 0.0
    low, high = 0.0, 2.0**-20
    while not holds(high):
        low, high = high, 4 * high
        if high > _MOST:
            return math.inf
    while high - low > _PRECISE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
