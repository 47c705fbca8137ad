"""`python -m xinfer replay RUN`: runs a recorded run again, here or elsewhere, and says if the same tokens came."""

__all__ = ["run"]

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from rich.markup import escape

from xinfer.config import Config
from xinfer.engine.engine import Observers
from xinfer.engine.outputs import RequestOutput
from xinfer.errors import ConfigError, XinferError
from xinfer.records import RunRecord
from xinfer.records.reader import RecordedRun, read_run
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.console import console
from xinfer.tasks.facts import Difference, differences
from xinfer.tasks.generate import Generation
from xinfer.tasks.noise import coarsest, precision_of
from xinfer.tasks.recorded import RecordedRequest, configuration_of, find_run, requests_of
from xinfer.tasks.recording import recording
from xinfer.tasks.verdict import Divergence, Judge, Top, told, top_at

_SHOWN = 8  # divergences that are told in full


@dataclass
class Replay:
    """What came of running a run again.

    Attributes:
        same, unfinished: samples whose tokens are as recorded, and those that the run had not ended.
        divergences: of the others.
        logprobs: the largest difference of the recorded logprobs of the same tokens; None where there are none.
        tokens: that are as recorded.
    """

    same: int = 0
    unfinished: int = 0
    tokens: int = 0
    logprobs: float | None = None
    divergences: list[Divergence] = field(default_factory=list)


def run(config: Config, job: Job) -> int:
    """Print on standard output what differs beforehand, and then the verdict; 1 if a token is not as recorded."""
    recorded = read_run(find_run(config.run))
    effective, unknown = configuration_of(recorded, job.overrides, job.plugins)
    requests = _chosen(recorded, config)
    effective.bench_only = not (config.replay.resume or config.request is not None)
    session = Session(effective, job.plugins)
    session.check()
    facts = differences(recorded, session, effective, job)
    facts += [Difference("setting", key, "set", "no longer known") for key in unknown]
    _show_facts(recorded, facts)
    record = RunRecord(job.folder if effective.record.enabled else None, effective.record.text, effective.record.steps)
    with recording(record, replace(job, resolved=asdict(effective))) as figures:
        generation = Generation(effective, session, record, job)
        figures |= generation.start(int(recorded.info.get("seed") or 0))
        for request in requests:
            _add(generation, request, config)
        try:
            generation.loop()
        finally:
            figures |= generation.figures()
        judge = Judge(generation.engine, [precision_of(session), _recorded_precision(recorded)])
        replay = _compared(requests, generation.outputs, judge)
        record.update(replay={"run": str(recorded.folder), "differences": [asdict(f) for f in facts]} | asdict(replay))
    session.close()
    if record.folder is not None:
        console(stderr=True).print(f"record  {escape(str(record.folder))}")
    _show(replay, _recorded_tops(recorded, requests, replay.divergences[:_SHOWN], job), session)
    return 1 if replay.divergences else 0


def _chosen(recorded: RecordedRun, config: Config) -> list[RecordedRequest]:
    """Return the requests that are to be run, as this command line says."""
    requests, wanted = requests_of(recorded), config.request
    if config.replay.first and wanted is None:
        raise ConfigError(f"--from {config.replay.first} is a token of one request: say which, with --request")
    if wanted is not None:
        requests = [request for request in requests if request.index == wanted]
        if not requests:
            raise ConfigError(f"--request {wanted}: {recorded.folder} has the requests 0 to {max(recorded.requests)}")
        _check_place(requests[0], config)
    if config.replay.resume:
        requests = [request for request in requests if request.unfinished]
        if not requests:
            raise ConfigError(f"{recorded.folder} has ended all of its requests: there is nothing to resume")
    return requests


def _check_place(request: RecordedRequest, config: Config) -> None:
    first, sample, most = config.replay.first, config.sample, request.params.n
    if not 0 <= sample < most:
        raise ConfigError(f"--sample {sample}: request {request.index} has the samples 0 to {most - 1}")
    tokens = len(request.tokens(sample))
    if first and not 0 < first < tokens:
        raise ConfigError(f"--from {first}: of request {request.index} {tokens} tokens are recorded, counted from 0")


def _add(generation: Generation, request: RecordedRequest, config: Config) -> None:
    """Queue a request as a whole, or a sample of it that goes on from some token."""
    prompt, ids, chat = request.prompt, request.prompt_token_ids, request.chat
    sample = config.sample if config.request is not None else 0
    done = request.tokens(sample)[: config.replay.first]
    if config.replay.resume and request.params.n == 1:
        done = request.tokens(0)
    if done or sample:
        known = {"output_token_ids": done, "sample": sample}
        generation.add(prompt, ids, chat, request.one_sample, index=request.index, **known)
    else:
        generation.add(prompt, ids, chat, request.params, index=request.index)


def _compared(requests: Sequence[RecordedRequest], outputs: Sequence[RequestOutput], judge: Judge) -> Replay:
    by_index, replay = {request.index: request for request in requests}, Replay()
    for output in sorted(outputs, key=lambda output: (output.index, output.sample)):
        request = by_index[output.index]
        expected, got = request.tokens(output.sample), list(output.token_ids)
        if output.sample in request.unfinished:  # whatever comes after what it had is new
            replay.unfinished += 1
            got = got[: len(expected)]
        if expected == got:
            replay.same += output.sample not in request.unfinished
            replay.tokens += len(got)
            _compare_logprobs(replay, request, output)
        else:
            replay.divergences.append(judge.judge(request, output.sample, expected, got))
    return replay


def _compare_logprobs(replay: Replay, request: RecordedRequest, output: RequestOutput) -> None:
    recorded = (request.samples.get(output.sample) or {}).get("logprobs")
    if recorded is None or output.logprobs is None:
        return
    new = output.logprobs[-len(recorded) :] if len(output.logprobs) >= len(recorded) else output.logprobs
    pairs = zip(recorded[-len(new) :], new, strict=True)
    largest = max((abs(one["logprob"] - other.logprob) for one, other in pairs), default=0.0)
    replay.logprobs = max(replay.logprobs or 0.0, largest)


def _recorded_precision(recorded: RecordedRun) -> str:
    config, runner = recorded.info.get("config") or {}, recorded.info.get("runner") or {}
    rounded = (config.get("model") or {}).get("quantization")
    return coarsest(rounded, runner.get("dtype") or "float32", runner.get("notes") or ())


def _show_facts(recorded: RecordedRun, facts: Sequence[Difference]) -> None:
    page = console()
    started, unknown = recorded.info.get("started", "?")[:19], recorded.info.get("hashes") is None
    page.print(
        f"{recorded.folder}: {len(recorded.requests)} requests, started {started}, {recorded.status}", markup=False
    )
    if unknown:
        page.print("the run ended before it had hashes of its model: that it is the same can't be verified")
    for fact in facts:
        shown = (text if len(text) <= 60 else f"{text[:57]}..." for text in (fact.recorded, fact.here))
        page.print(f"differs  {fact.kind} {fact.name}: {' -> '.join(shown)}", markup=False)


def _show(replay: Replay, theirs: Sequence[Top], session: Session) -> None:
    page = console()
    for found, top in zip(replay.divergences[:_SHOWN], theirs, strict=True):
        for line in told(found, session.token_text, top):
            page.print(line, markup=False)
    if len(replay.divergences) > _SHOWN:
        page.print(f"and {len(replay.divergences) - _SHOWN} more, which the record names", markup=False)
    if replay.unfinished:
        page.print(f"finished  {replay.unfinished} texts that the run had not ended")
    logprobs = "" if replay.logprobs is None else f", logprobs {_apart(replay.logprobs)}"
    if replay.divergences:
        near = sum(found.near_tie for found in replay.divergences)
        kinds = f"{near} part at a near-tie, {len(replay.divergences) - near} at a fault"
        page.print(f"different  {len(replay.divergences)} texts: {kinds}; {replay.same} are the same{logprobs}")
    else:
        page.print(f"identical  {replay.same} texts, {replay.tokens} tokens{logprobs}")


def _apart(largest: float) -> str:
    return "the same bit for bit" if largest == 0 else f"at most {largest:.2g} apart"


def _recorded_tops(
    recorded: RecordedRun, requests: Sequence[RecordedRequest], found: Sequence[Divergence], job: Job
) -> list[Top]:
    """Return what was likeliest in the run where texts part: as recorded, or computed as then, if that can be."""
    by_index = {request.index: request for request in requests}
    tops = [_recorded_top(by_index[each.index], each) for each in found]
    if all(tops):
        return tops
    with suppress(XinferError):  # of a backend, say, that is not there
        config, _ = configuration_of(recorded, [], job.plugins)
        session = Session(config, job.plugins)
        session.check()
        engine = session.engine(0, Observers())
        tops = [top or top_at(engine, by_index[each.index], each) for top, each in zip(tops, found, strict=True)]
        session.close()
    return tops


def _recorded_top(request: RecordedRequest, found: Divergence) -> Top:
    """Return the likeliest tokens that the run recorded, with log-probabilities in the place of logits."""
    told = (request.samples.get(found.sample) or {}).get("logprobs") or []
    top = told[found.at]["top"] if found.at < len(told) else []
    return tuple((token, value, math.exp(value)) for token, value in top)
