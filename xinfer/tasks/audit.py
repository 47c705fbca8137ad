"""`python -m xinfer audit`: changes one by one what should not change tokens, and says whether it did."""

__all__ = ["run"]

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import rich.box
import rich.table
from rich.markup import escape

from xinfer.config import Config
from xinfer.engine.engine import Observers
from xinfer.engine.random import derive
from xinfer.errors import ConfigError, UsageError, nearest
from xinfer.inputs import Prompt
from xinfer.models.windows import windows
from xinfer.records import RunRecord
from xinfer.records.record import write_json
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.audit_trials import ALL_TRIALS, Outcome, Trial, outcome_of, outcome_of_processes
from xinfer.tasks.console import Progress, console
from xinfer.tasks.noise import noise_of, precision_of
from xinfer.tasks.recorded import RecordedRequest
from xinfer.tasks.recording import recording
from xinfer.tasks.variants import varied
from xinfer.tasks.verdict import Divergence, Judge, first_difference, row_of, sequence_at, told

_SHARED, _PROMPT = 40, 24  # tokens that half of the prompts begin with, and that each has of its own
_SEED = 20


@dataclass
class Found:
    """What came of a trial.

    Attributes:
        name: of the trial.
        verdict: identical, near-tie, wrong, or not tried.
        texts, same: compared with those that came without the change, and how many are the same.
        logprobs: the largest difference of the logprobs of the same tokens; None where none were compared.
        note: what happened, or why it was not tried.
        divergences: of texts that are not the same.
    """

    name: str
    verdict: str
    texts: int = 0
    same: int = 0
    logprobs: float | None = None
    note: str = ""
    divergences: list[Divergence] = field(default_factory=list)


def run(config: Config, job: Job) -> int:
    """Print a table on standard output; 1 if anything is wrong."""
    trials = _chosen(config)
    session = Session(config, job.plugins)
    session.check()
    record = RunRecord(job.folder if config.record.enabled else None, config.record.text, config.record.steps)
    with recording(record, job) as figures:
        with Progress("as configured"):
            audit = _Audit(session, _requests(session, config, job), job)
        found = [audit.itself(), *(audit.tried(trial) for trial in trials)]
        wrong = [each for each in found if each.verdict == "wrong"]
        figures |= {"trials": len(found), "wrong": len(wrong)}
        record.update(audit=[asdict(each) for each in found])
        if record.folder is not None:
            write_json(record.folder / "audit.json", [asdict(each) for each in found])
    _show(found, session)
    session.close()
    return 1 if wrong else 0


def _chosen(config: Config) -> list[Trial]:
    names = {trial.name: trial for trial in ALL_TRIALS}
    for name in config.audit.only or ():
        if name not in names:
            raise ConfigError(
                f"audit.only names {name!r}, which is unknown{nearest(name, names)} (there are: {', '.join(names)})"
            )
    for name in ("prompts", "tokens"):
        if getattr(config.audit, name) < 1:
            raise ConfigError(f"audit.{name}={getattr(config.audit, name)} is out of range: at least 1 is expected")
    return [trial for trial in ALL_TRIALS if config.audit.only is None or trial.name in config.audit.only]


def _requests(session: Session, config: Config, job: Job) -> list[RecordedRequest]:
    """Return each prompt twice: drawn as configured, and greedily."""
    prompts = [tuple(session.encode(prompt)[0]) for prompt in job.prompts] or _made_up(session, config.audit.prompts)
    tokens = config.audit.tokens
    params = replace(
        session.params, n=1, max_tokens=tokens, min_tokens=0, ignore_eos=True, logprobs=0, prompt_logprobs=None
    )
    seed = _SEED if session.params.seed is None else session.params.seed
    return [
        RecordedRequest(
            index=index,
            prompt_token_ids=prompt,
            params=replace(params, seed=derive(seed, index), temperature=0.0 if index % 2 else params.temperature),
            samples={},
            prompt=Prompt(token_ids=prompt),
            chat=False,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(2))
    ]


def _made_up(session: Session, count: int) -> list[tuple[int, ...]]:
    """Return prompts of several lengths, of which half share their beginning, and each says its end twice."""
    if not session.computes_checkpoint:
        raise ConfigError(f"backend {session.backend.name} brings its own model: give prompts, with --prompt")
    pieces = windows(session.model, _SHARED + _PROMPT, count)
    prompts = []
    for number, ids in enumerate(np.asarray(each) for each in pieces):
        own = ids[_SHARED : _SHARED + 4 + (7 * number) % _PROMPT].tolist()
        begin = pieces[0][:_SHARED].tolist() if number % 2 else ids[: number % _SHARED].tolist()
        prompts.append((*begin, *own, *own))
    return prompts


class _Audit:
    """Compares what comes of requests with what came of them without any change."""

    def __init__(self, session: Session, requests: list[RecordedRequest], job: Job) -> None:
        self.session, self.requests, self.job = session, requests, job
        self.engine = session.engine(0, Observers())
        self.expected = outcome_of(self.engine, requests)
        self.longest = max(len(request.prompt_token_ids) + (request.params.max_tokens or 0) for request in requests)
        self.precision = precision_of(session)
        self.judge = Judge(self.engine, [self.precision])
        row = row_of(self.engine, sequence_at(self.engine, requests[0], 0, []))
        self.tolerance = 2 * noise_of(row, self.precision, rare=True)  # of a logprob: its logit's, and all others'

    def itself(self) -> Found:
        """Return how the requests as they came again compare with how they came first."""
        return self.compared("as configured", self.expected)

    def tried(self, trial: Trial) -> Found:
        """Return what came of a trial."""
        changes = trial.changes(self.session, self.longest)
        if isinstance(changes, str):
            return Found(trial.name, "not tried", note=changes)
        try:
            with Progress(trial.name):
                if trial.name == "tensor_parallelism":
                    outcome = outcome_of_processes(self.requests, self.job.overrides, *changes)
                    return replace(self.compared(trial.name, outcome), note=changes[0])
                other = Session(varied(self.job, changes), self.job.plugins)
                other.check()
                engine = other.engine(0, Observers())
                trial.prepare(engine, self.expected.texts)
                outcome = outcome_of(engine, self.requests)
                other.close()
        except UsageError as error:
            return Found(trial.name, "not tried", note=str(error))
        if not trial.words:
            return self.compared(trial.name, outcome)
        there, usual = trial.count(outcome.steps), trial.count(self.expected.steps)
        note = f"{there} {trial.words}, as configured {usual}"
        if there == usual:
            return Found(trial.name, "not tried", note=f"it made no difference here: {note}")
        return replace(self.compared(trial.name, outcome), note=note)

    def compared(self, name: str, outcome: Outcome) -> Found:
        """Return how texts compare with those that came first."""
        found = Found(name, "identical")
        by_index = {request.index: request for request in self.requests}
        for (_, index), (tokens, values) in sorted(outcome.texts.items()):
            expected, expected_values = self.expected.texts[0, index]
            found.texts += 1
            at = first_difference(expected, tokens)
            apart = [abs(a - b) for a, b in zip(expected_values[:at], values[:at], strict=True)]
            found.logprobs = max([found.logprobs or 0.0, *apart])
            if at is None:
                found.same += 1
            else:
                found.divergences.append(self.judge.judge(by_index[index], 0, expected, tokens))
        if any(not each.near_tie for each in found.divergences) or not (found.logprobs or 0.0) <= self.tolerance:
            found.verdict = "wrong"
        elif found.divergences:
            found.verdict = "near-tie"
        return found


def _show(found: Sequence[Found], session: Session) -> None:
    page = console()
    table = rich.table.Table(
        "change", "verdict", "texts the same", "logprobs apart", "", box=rich.box.SIMPLE, pad_edge=False
    )
    colours = {"identical": "green", "near-tie": "yellow", "wrong": "bold red", "not tried": "dim"}
    for each in found:
        verdict = f"[{colours[each.verdict]}]{each.verdict}[/]"
        same = f"{each.same} of {each.texts}" if each.texts else ""
        table.add_row(each.name, verdict, same, _apart(each), escape(each.note))
    page.print(table)
    for each in found:
        for divergence in sorted(each.divergences, key=lambda divergence: divergence.near_tie)[:2]:
            page.print(f"{each.name}:", *told(divergence, session.token_text), sep="\n", markup=False)


def _apart(found: Found) -> Any:
    return "" if found.logprobs is None else "0" if found.logprobs == 0 else f"{found.logprobs:.2g}"
