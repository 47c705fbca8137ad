"""Two texts that should be the same: where they part, and whether that is a near-tie or a fault."""

__all__ = ["Divergence", "Judge", "Top", "first_difference", "row_of", "sequence_at", "told", "top_at"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from xinfer.engine.decision import Decision, decide, prepared, reach, stages
from xinfer.engine.engine import Engine
from xinfer.engine.forcing import forced
from xinfer.engine.types import Sequence as Tokens
from xinfer.errors import RequestError
from xinfer.tasks.noise import noise_of
from xinfer.tasks.recorded import RecordedRequest

Top = tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two texts part.

    Attributes:
        index, sample: whose text.
        at: which token of the answer, counted from 0.
        expected, got: the tokens there; None where a text had ended.
        decision: what the row of logits here gives, and what that depended on; None where neither text has a token.
        margin: the difference of the logits of the two tokens.
        needed: by how much at least some logit here must change for each of the two tokens to come.
        tolerance: up to which change of logits that may be chance.
        top: the likeliest tokens here: id, logit, and probability as they are drawn.
        prefix: tokens before it, of prompt and answer.
    """

    index: int
    sample: int
    at: int
    expected: int | None
    got: int | None
    decision: Decision | None = None
    margin: float | None = None
    needed: float = 0.0
    tolerance: float = 0.0
    top: Top = ()
    prefix: tuple[int, ...] = ()

    @property
    def near_tie(self) -> bool:
        """Whether it is no more than logits may differ."""
        return self.decision is not None and self.needed <= self.tolerance


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first place at which two texts differ, which may be the end of one; None where they are the same."""
    places = (i for i, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other)
    shorter = min(len(expected), len(got))
    return next(places, None if len(expected) == len(got) else shorter)


class Judge:
    """Computes the row of logits at which two texts part, on a runner that nobody else uses any more.

    Args:
        engine: whose requests they are; its cache is written over.
        precisions: of the two sides.
    """

    def __init__(self, engine: Engine, precisions: Sequence[str]) -> None:
        self.engine, self.precisions = engine, tuple(precisions)

    def judge(self, request: RecordedRequest, sample: int, expected: Sequence[int], got: Sequence[int]) -> Divergence:
        """Return where two different texts of a sample part."""
        at = first_difference(expected, got)
        assert at is not None
        wanted, came = (text[at] if at < len(text) else None for text in (expected, got))
        try:
            sequence = sequence_at(self.engine, request, sample, expected[:at])
        except RequestError:  # one text goes on where the other must end
            return Divergence(request.index, sample, at, wanted, came)
        logits = row_of(self.engine, sequence)
        row = prepared(logits, sequence, self.engine.sampler.processors)[: self.engine.admission.vocab_size]
        decision = decide(row, sequence)
        tokens = [token for token in (wanted, came) if token is not None]
        return Divergence(
            request.index,
            sample,
            at,
            wanted,
            came,
            decision=decision,
            margin=abs(float(row[tokens[0]] - row[tokens[-1]])) if len(tokens) == 2 else None,
            needed=max(reach(row, sequence, token) for token in tokens),
            tolerance=noise_of(row, *self.precisions, rare=True),
            top=stages(logits, row, sequence)[-1].top,
            prefix=tuple(sequence.token_ids),
        )


def sequence_at(engine: Engine, request: RecordedRequest, sample: int, output: Sequence[int]) -> Tokens:
    """Return a request's sample as it is before its next token, to be looked at; it is not queued."""
    return engine.admission.sequence(
        request.prompt_token_ids,
        request.one_sample,
        engine.max_model_len,
        index=request.index,
        output_token_ids=output,
        sample=sample,
    )


def row_of(engine: Engine, sequence: Tokens) -> Tensor:
    """Return the logits [V] after a sequence's tokens, computed as it was: the prompt, then token by token."""
    tokens, prompt = sequence.token_ids, sequence.num_prompt
    pieces = list(forced(engine.runner, engine.scheduler.limits, tokens, len(tokens) - 1, alone_from=prompt))
    return pieces[-1][-1].cpu().clone()


def top_at(engine: Engine, request: RecordedRequest, found: Divergence) -> Top:
    """Return what is likeliest on another runner where two texts part."""
    output = found.prefix[len(request.prompt_token_ids) :]
    sequence = sequence_at(engine, request, found.sample, output)
    logits = row_of(engine, sequence)
    return stages(logits, prepared(logits, sequence, engine.sampler.processors), sequence)[-1].top


def told(found: Divergence, text_of: Callable[[int], str], theirs: Top = ()) -> Iterator[str]:
    """Yield in lines what is to be said of a divergence; `text_of` shows a token."""

    def token(token_id: int | None) -> str:
        return "the end" if token_id is None else f"{text_of(token_id)} ({token_id})"

    name = f"request {found.index}" + (f", sample {found.sample}" if found.sample else "")
    yield f"{name}, token {found.at}: {token(found.got)} instead of {token(found.expected)}"
    decision = found.decision
    if decision is None:
        yield "  fault: one text has ended where the other goes on"
        return
    kind = "near-tie" if found.near_tie else "fault"
    comparison = "no more than" if found.near_tie else "more than"
    yield (
        f"  {kind}: for both to come logits must differ by {found.needed:.3g}, {comparison} the {found.tolerance:.3g} "
        "that may be chance here" + ("" if found.margin is None else f"; the two are {found.margin:.3g} apart")
    )
    if decision.u is not None and decision.interval is not None:
        low, high = decision.interval
        yield f"  u = {decision.u:.6f} falls here into {low:.6f} to {high:.6f}, which is {token(decision.token_id)}"
    for where, top in (("here", found.top), ("there", theirs)):
        if top:
            shown = "  ".join(f"{text_of(t)} {logit:.3f} ({share:.1%})" for t, logit, share in top)
            yield f"  {where:5}  {shown}"
