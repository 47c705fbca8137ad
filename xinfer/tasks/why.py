"""`python -m xinfer why [RUN] --request I --token J`: why a token came, and which of a text would survive elsewhere."""

__all__ = ["Explained", "explained", "run"]

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import rich.box
import rich.table
from rich.markup import escape
from torch import Tensor

from xinfer.config import Config
from xinfer.engine.decision import Decision, decide, prepared, stages
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.forcing import forced
from xinfer.engine.types import Sequence as Tokens
from xinfer.errors import ConfigError
from xinfer.records.reader import read_run
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.console import console
from xinfer.tasks.noise import FLIPS, spread
from xinfer.tasks.recorded import RecordedRequest, configuration_of, find_run, requests_of
from xinfer.tasks.verdict import row_of, sequence_at

_WEAKEST = 12  # tokens of a text that are listed


@dataclass(frozen=True, slots=True)
class Explained:
    """A token of a text as recorded, and what the row of logits there says.

    Attributes:
        at: which token of the answer.
        token_id: as recorded.
        decision: what comes here.
        needed: for each precision, the margin above which tokens nearly always survive it there.
    """

    at: int
    token_id: int
    decision: Decision
    needed: dict[str, float]

    def survives(self, precision: str) -> bool:
        """Whether the same token is likely to come in another precision."""
        return self.decision.token_id == self.token_id and self.decision.margin > self.needed[precision]


def run(config: Config, job: Job) -> int:
    """Print on standard output what a token depended on, or of all tokens of a text which depended on least."""
    recorded = read_run(find_run(config.run))
    effective, _ = configuration_of(recorded, job.overrides, job.plugins)
    request = _request(requests_of(recorded), config)
    tokens, at = request.tokens(config.sample), config.why.token
    if at is not None and not 0 <= at < len(tokens):
        raise ConfigError(f"--token {at}: of request {request.index} {len(tokens)} tokens are recorded, from 0")
    noises = _noises(config.why.noise)
    session = Session(effective, job.plugins)
    session.check()
    engine = session.engine(0, Observers())
    if config.json:
        found = list(explained(engine, request, config.sample, noises))
        print(json.dumps([asdict(each) for each in (found if at is None else found[at : at + 1])]))
    elif at is not None:
        _show_token(engine, session, request, config, noises)
    else:
        _show_text(list(explained(engine, request, config.sample, noises)), session, noises)
    session.close()
    return 0


def explained(
    engine: Engine, request: RecordedRequest, sample: int, noises: dict[str, float | None]
) -> Iterator[Explained]:
    """Yield each token of a recorded text; the engine's cache is written over.

    `noises` has names with a change of logits, or None for that of the precision of the name.
    """
    output = request.tokens(sample)
    sequence = sequence_at(engine, request, sample, [])
    tokens, prompt = [*sequence.token_ids, *output], sequence.num_prompt
    rows = forced(engine.runner, engine.scheduler.limits, tokens[:-1], prompt - 1, alone_from=prompt)
    for at, (row, token) in enumerate(zip((row for piece in rows for row in piece), output, strict=True)):
        row = _prepared(engine, row.cpu(), sequence)
        yield Explained(at, token, decide(row, sequence), _at(row, noises))
        sequence.add(token)


def _request(requests: Sequence[RecordedRequest], config: Config) -> RecordedRequest:
    wanted = config.request or 0
    found = next((request for request in requests if request.index == wanted), None)
    if found is None:
        raise ConfigError(f"--request {wanted}: the run has the requests {requests[0].index} to {requests[-1].index}")
    if not found.tokens(config.sample):
        raise ConfigError(f"--request {wanted} --sample {config.sample}: no tokens of it are recorded")
    return found


def _noises(wanted: str | None) -> dict[str, float | None]:
    """Return what is held against margins: named precisions, or a number."""
    if wanted is None:
        return dict.fromkeys(FLIPS)
    if wanted in FLIPS:
        return {wanted: None}
    try:
        return {f"a change of {float(wanted):g}": float(wanted)}
    except ValueError:
        raise ConfigError(f"why.noise={wanted!r} is neither a number nor one of {', '.join(FLIPS)}") from None


def _at(row: Tensor, noises: dict[str, float | None]) -> dict[str, float]:
    scale = spread(row)
    return {name: FLIPS[name] * scale if value is None else value for name, value in noises.items()}


def _prepared(engine: Engine, logits: Tensor, sequence: Tokens) -> Tensor:
    return prepared(logits, sequence, engine.sampler.processors)[: engine.admission.vocab_size]


def _show_token(
    engine: Engine, session: Session, request: RecordedRequest, config: Config, noises: dict[str, float | None]
) -> None:
    page, at, output = console(), config.why.token or 0, request.tokens(config.sample)
    sequence = sequence_at(engine, request, config.sample, output[:at])
    logits = row_of(engine, sequence)[: engine.admission.vocab_size]
    row = _prepared(engine, logits, sequence)
    found = Explained(at, output[at], decide(row, sequence), _at(row, noises))
    before = session.tokenizer.decode(sequence.token_ids[-12:], False)
    page.print(f"request {request.index}, token {at}: {_token(session, output[at])}, after {before!r}", markup=False)
    table = rich.table.Table("stage", "kept", "likeliest", box=rich.box.SIMPLE, pad_edge=False)
    for stage in stages(logits, row, sequence, config.why.top):
        shown = "  ".join(f"{session.token_text(t)} {logit:.3f} ({share:.1%})" for t, logit, share in stage.top)
        table.add_row(stage.name, f"{stage.kept}", escape(shown))
    page.print(table)
    decision = found.decision
    if decision.token_id != output[at]:
        page.print(f"here {_token(session, decision.token_id)} comes instead: replay says more", markup=False)
    if decision.u is not None and decision.interval is not None:
        low, high = decision.interval
        page.print(f"u = {decision.u:.6f}, and the token's interval is {low:.6f} to {high:.6f}")
    other = "nothing else" if decision.instead is None else _token(session, decision.instead)
    page.print(
        f"margin {decision.margin:.4g}: if no logit changes by more, it stays; then {other} may come", markup=False
    )
    for name, needed in found.needed.items():
        verdict = "survives" if found.survives(name) else "may not survive"
        page.print(f"{verdict} {name}, for which a margin of {needed:.3g} is nearly always enough", markup=False)


def _show_text(tokens: list[Explained], session: Session, noises: dict[str, float | None]) -> None:
    page = console()
    page.print(f"{len(tokens)} tokens")
    for name in noises:
        lost = [each for each in tokens if not each.survives(name)]
        page.print(f"{len(lost)} of them may not survive {name}" + _places(lost), markup=False)
    table = rich.table.Table("token", "text", "margin", "instead", "interval", "u", box=rich.box.SIMPLE, pad_edge=False)
    for each in sorted(tokens, key=lambda each: each.decision.margin)[:_WEAKEST]:
        decision = each.decision
        interval = "" if decision.interval is None else "{:.6f} to {:.6f}".format(*decision.interval)
        other = "" if decision.instead is None else session.token_text(decision.instead)
        drawn = "" if decision.u is None else f"{decision.u:.6f}"
        texts = (escape(session.token_text(each.token_id)), f"{decision.margin:.4g}", escape(other), interval, drawn)
        table.add_row(f"{each.at}", *texts)
    page.print(f"those of the least margins, of {len(tokens)}:")
    page.print(table)


def _places(lost: Sequence[Explained]) -> str:
    if not lost:
        return ""
    shown = ", ".join(str(each.at) for each in lost[:_WEAKEST])
    return f": {shown}{', ...' if len(lost) > _WEAKEST else ''}"


def _token(session: Session, token_id: int) -> str:
    return f"{session.token_text(token_id)} ({token_id})"
