"""`python -m xinfer`: what the model says goes to standard output, everything else to standard error and the record."""

__all__ = ["run"]

import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from omegaconf import OmegaConf

from xinfer import hardware
from xinfer.config import Config
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.random import fresh_seed
from xinfer.engine.sampler import effective
from xinfer.engine.stats import summarize
from xinfer.engine.types import FinishReason, RequestOutput, SamplingParams, StepOutput
from xinfer.errors import UsageError, XinferError
from xinfer.inputs import Prompt
from xinfer.logs import log_to_file
from xinfer.models.cache import cache_folder
from xinfer.records import RunRecord, redacted, write_report
from xinfer.records.provenance import Provenance
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.console import Progress, TextWriter, show_summary

log = logging.getLogger(__name__)

DEFAULT_PROMPT = "Explain gravity in one sentence."


def run(config: Config, job: Job) -> int:
    """Generate, record, report; return the exit code."""
    session = Session(config, job.plugins)
    session.check()
    prompts = [replace(p, text=DEFAULT_PROMPT) if p.text is None and p.token_ids is None else p for p in job.prompts]
    prompts = prompts or [Prompt(DEFAULT_PROMPT)]
    record = RunRecord(job.folder if config.record.enabled else None, config.record.text, config.record.steps)
    requests = [(prompt, *session.encode(prompt), _params(session.params, prompt)) for prompt in prompts]
    seed = session.params.seed if session.params.seed is not None else fresh_seed()
    with recording(record, job) as figures:
        generation = Generation(config, session, record, job)
        figures |= generation.start(seed)
        for prompt, ids, chat, params in requests:
            generation.add(prompt, ids, chat, params)
        try:
            generation.loop()
        finally:
            figures |= generation.figures()
    if record.folder is not None:
        write_report(record.folder)
    if config.json_stats is not None:
        _write_json_stats(config.json_stats, figures)
    show_summary(figures, _replay_command(config, job, record, seed), record.folder)
    failed = [o for o in generation.outputs if o.finish_reason is FinishReason.ERROR]
    for output in failed:
        print(f"xinfer: request {output.index} failed: {output.error}", file=sys.stderr)
    return 3 if failed else 0


@contextmanager
def recording(record: RunRecord, job: Job) -> Iterator[dict[str, Any]]:
    """Keep a run's log and hooks, and its end, however it ends; yields the figures, to be filled in."""
    figures: dict[str, Any] = {}
    record.update(
        task=job.resolved["task"],
        command=["python", "-m", "xinfer", *job.overrides],
        config=redacted(job.resolved),
        versions=hardware.versions(),
        hardware=asdict(hardware.describe()),
        plugins=[asdict(plugin) for plugin in job.plugins.loaded],
    )
    handler = log_to_file(record.folder / "xinfer.log") if record.folder is not None else None
    if record.folder is not None:
        _write_hydra_files(record.folder / ".hydra", job)
    job.plugins.tell("xinfer_on_run_start", record.run())
    status = "failed"
    try:
        yield figures
        status = "completed"
    except UsageError:
        status = "refused"
        raise
    except (KeyboardInterrupt, BrokenPipeError):
        status = "interrupted"
        raise
    finally:
        if job.plugins.silenced:
            record.update(silenced_plugins=dict(job.plugins.silenced))
        record.finish(status, figures)
        job.plugins.tell("xinfer_on_run_end", record.run(figures))
        if handler is not None:
            logging.getLogger("xinfer").removeHandler(handler)
            handler.close()
        if status == "refused":
            record.discard()


class Generation:
    """One run of the engine over the user's prompts."""

    def __init__(self, config: Config, session: Session, record: RunRecord, job: Job) -> None:
        self.config, self.session, self.record, self.job = config, session, record, job
        self.outputs: list[RequestOutput] = []
        self._queued: list[str] = []
        self.writer = TextWriter(sys.stdout, silent=config.bench_only)
        self.engine: Engine
        self._steps = _StepTotals()
        self._started = perf_counter()

    def start(self, seed: int) -> dict[str, Any]:
        """Load the model and make the engine; return what is known before the first step."""
        with Progress("loading the model"):
            runner = self.session.runner
        self.provenance = Provenance(self.session.hashes())
        plugins = self.job.plugins.observers()
        observers = Observers(
            on_step=(self.record.step, self._steps.add, *plugins.on_step),
            on_token=plugins.on_token,
            on_request_finished=(self.record.output, *plugins.on_request_finished),
        )
        self.engine = self.session.engine(seed, observers)
        self.record.update(seed=seed, greedy=self.session.params.greedy, **self.session.describe())
        return {
            "seed": seed,
            "sampling": _effective(self.session.params),
            "streaming": False,
            "resident_weight_bytes": runner.info.resident_weight_bytes,
            "kv_cache_bytes": runner.info.kv_cache_bytes,
            "device": runner.info.device,
            "dtype": runner.info.dtype,
        }

    def add(self, prompt: Prompt, ids: list[int], chat: bool, params: SamplingParams) -> None:
        """Queue one prompt."""
        request = self.engine.add_request(ids, params)
        self._queued.append(request.request_id)
        text = {"prompt": prompt.text, "system": prompt.system, "stop": list(prompt.stop), "chat": chat}
        self.record.request(request, text)
        log.info("request queued", extra={"index": request.index, "prompt_tokens": len(ids), "chat": chat})

    def loop(self) -> None:
        """Step until all is done; show text as it comes."""
        self._started = perf_counter()
        most = sum(s.limit - s.num_prompt for s in self.engine.scheduler.waiting)
        try:
            with Progress("generating", total=most) as progress:
                for step in self.engine.run():
                    self._show(step)
                    progress.advance(len(step.tokens))
        except (KeyboardInterrupt, BrokenPipeError):
            for request_id in self._queued:
                self.engine.abort(request_id)
            self.outputs += self.engine.step().finished  # computes nothing, but tells the record how far they came
            raise

    def _show(self, step: StepOutput) -> None:
        for token in step.tokens:
            self.writer.write(token.index, token.text)
        for output in step.finished:
            self.outputs.append(output)
            self.writer.finish(output.index, output.tail)
            stats = output.stats
            log.info(
                _ENDINGS[output.finish_reason],
                extra={
                    "index": output.index,
                    "generated_tokens": stats.generated_tokens,
                    "prefill_ms": stats.prefill_ms,
                    "decode_tok_s": stats.decode_tok_s,
                },
            )

    def figures(self) -> dict[str, Any]:
        """Return the run's figures, as far as it came."""
        figures = summarize([output.stats for output in self.outputs], perf_counter() - self._started)
        figures["peak_memory_bytes"] = hardware.peak_memory()
        self.record.update(**self.provenance.result())
        return figures | self._steps.roofline(self.session)


class _StepTotals:
    """Adds up what decode steps had to read, for the roofline."""

    def __init__(self) -> None:
        self.count, self.milliseconds, self.kv_tokens = 0, 0.0, 0

    def add(self, output: StepOutput) -> None:
        """Count a step, if it only decoded."""
        if output.stats.stage == "decode":
            self.count += 1
            self.milliseconds += output.stats.step_ms
            self.kv_tokens += output.stats.kv_tokens

    def roofline(self, session: Session) -> dict[str, Any]:
        """Return how long decode steps would take if all they did was read weights and cache, as a share of theirs."""
        info = session.runner.info
        if not self.count or not info.step_read_bytes:
            return {"roofline": None}
        speed = hardware.speed(_torch_device(info.device), cache=cache_folder())
        read = self.count * info.step_read_bytes + self.kv_tokens * info.kv_token_bytes
        floor = read / speed.read_bytes_s * 1e3
        return {
            "roofline": {
                "read_bytes_per_step": round(read / self.count),
                "read_bandwidth_bytes_s": speed.read_bytes_s,
                "floor_ms_per_step": floor / self.count,
                "step_ms": self.milliseconds / self.count,
                "share": floor / self.milliseconds,
            }
        }


_ENDINGS = {
    FinishReason.STOP: "end of sequence",
    FinishReason.LENGTH: "length reached",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "request failed",
}


def _torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


def _params(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    return replace(params, stop=prompt.stop, seed=prompt.seed)


def _effective(params: SamplingParams) -> dict[str, Any]:
    values = {k: v for k, v in asdict(params).items() if k not in ("seed", "stop", "extra")}
    return values | {"summary": effective(params)}


def _write_hydra_files(folder: Path, job: Job) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in (("config", job.resolved), ("hydra", job.hydra), ("overrides", list(job.overrides))):
        OmegaConf.save(OmegaConf.create(redacted(content)), folder / f"{name}.yaml")


def _write_json_stats(target: str, figures: dict[str, Any]) -> None:
    line = json.dumps(figures, default=str)
    if target == "-":
        print(line, file=sys.stderr)
        return
    try:
        Path(target).expanduser().write_text(line + "\n", "utf-8")
    except OSError as error:
        raise XinferError(f"json_stats={target!r}: can't be written ({error.strerror})") from error


def _replay_command(config: Config, job: Job, record: RunRecord, seed: int) -> str | None:
    """Return the command that runs the same again, or None where the record does not hold the texts."""
    if record.folder is None or config.record.text != "full":
        return None
    kept = [o for o in job.overrides if o.partition("=")[0] not in ("sampling.seed", "task", "chat")]
    words = [
        "python",
        "-m",
        "xinfer",
        *kept,
        f"sampling.seed={seed}",
        "--requests",
        _short(record.folder) + "/requests.jsonl",
    ]
    return shlex.join(words)


def _short(path: Path) -> str:
    """Return a path relative to where the user stands, if it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
