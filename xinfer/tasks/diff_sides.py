"""The two sides of a comparison, and the texts that both are given."""

__all__ = ["Side", "Text", "side_of", "texts_for"]

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xinfer.config import Config
from xinfer.engine.engine import Observers
from xinfer.engine.random import fresh_seed
from xinfer.errors import ConfigError, UsageError
from xinfer.models.windows import windows
from xinfer.records.reader import RecordedRun, read_run
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.noise import precision_of
from xinfer.tasks.recorded import RecordedRequest, configuration_of, find_run, requests_of
from xinfer.tasks.variants import varied


@dataclass(frozen=True, slots=True)
class Side:
    """One side: a backend or a run, loaded.

    Attributes:
        name: as the command line has it, with what is different of it.
        session: what computes.
        run: the recorded run, if it is one.
    """

    name: str
    session: Session
    run: RecordedRun | None

    @property
    def precision(self) -> str:
        """In which precision it computes."""
        return precision_of(self.session)


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens that both sides are given.

    Attributes:
        name: of the text, for people.
        token_ids: all of it.
        first: logits of this token and those after it are compared.
        request: whose it is, if it was generated; then what each side would have drawn is compared too.
    """

    name: str
    token_ids: tuple[int, ...]
    first: int
    request: RecordedRequest | None = None


def side_of(name: str, overrides: Sequence[str], job: Job) -> Side:
    """Return a side by the name of a backend, a run's folder, or `latest`."""
    run = None
    if name in job.plugins.backends or name in job.plugins.failed:
        config = varied(job, [f"backend={name}", *overrides])
    else:
        run = read_run(_found(name, job))
        config, _ = configuration_of(run, [*job.overrides, *overrides], job.plugins)
    session = Session(config, job.plugins)
    session.check()
    if not session.computes_checkpoint:
        raise ConfigError(f"backend {name} computes something of its own: there is nothing to compare it with")
    return Side(" ".join([name, *overrides]), session, run)


def _found(name: str, job: Job) -> Path:
    try:
        return find_run(name)
    except UsageError as error:
        backends = ", ".join(sorted(job.plugins.backends))
        raise UsageError(f"{name!r} is no backend (there are: {backends}), and as a run: {error}") from None


def texts_for(sides: Sequence[Side], config: Config, job: Job) -> list[Text]:
    """Return the texts of the first side that is a run; else answers of the first side; else what is shipped.

    Each has at most `diff.tokens` tokens, and no more than either side takes.
    """
    longest = min(config.diff.tokens, *(side.session.runner.info.max_model_len for side in sides))
    if longest < 2:
        raise ConfigError(f"diff.tokens={config.diff.tokens} is out of range: at least 2 are expected")
    for side in sides:
        if side.run is not None:
            return [text for request in requests_of(side.run) for text in _of(request, longest)]
    session = sides[0].session
    if job.prompts:
        return [text for request in _answered(session, job) for text in _of(request, longest)]
    shipped = windows(session.model, longest, config.diff.texts)
    return [Text(f"text {number}", tuple(map(int, ids)), 0) for number, ids in enumerate(shipped)]


def _of(request: RecordedRequest, longest: int) -> list[Text]:
    prompt = request.prompt_token_ids
    texts = []
    for sample in sorted(request.samples):
        tokens = (*prompt, *request.tokens(sample))[:longest]
        name = f"request {request.index}" + (f", sample {sample}" if sample else "")
        if len(tokens) > len(prompt):
            texts.append(Text(name, tokens, len(prompt) - 1, request if not sample else None))
    return texts


def _answered(session: Session, job: Job) -> list[RecordedRequest]:
    """Return what a side answers to the prompts of the command line, as a run's record would have it."""
    seed = session.params.seed if session.params.seed is not None else fresh_seed()
    engine, found = session.engine(seed, Observers()), []
    asked = {}
    for prompt in job.prompts:
        ids, chat = session.encode(prompt)
        asked[engine.add_request(ids, session.params_of(prompt)).index] = (prompt, chat)
    for output in (output for step in engine.run() for output in step.finished if output.sample == 0):
        prompt, chat = asked[output.index]
        params = replace(output.params, seed=output.seed)
        samples = {0: {"token_ids": list(output.token_ids), "finish_reason": str(output.finish_reason)}}
        found.append(RecordedRequest(output.index, output.prompt_token_ids, params, samples, prompt, chat))
    return sorted(found, key=lambda request: request.index)
