"""`python -m xinfer`: what the model says goes to standard output, everything else to standard error and the record."""

__all__ = ["Generation", "run"]

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from xinfer import hardware
from xinfer.config import Config
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.outputs import RequestOutput, StepOutput
from xinfer.engine.random import fresh_seed
from xinfer.engine.sampler import effective
from xinfer.engine.stats import summarize
from xinfer.engine.types import FinishReason, SamplingParams
from xinfer.inputs import Prompt
from xinfer.records import RunRecord
from xinfer.records.provenance import Provenance
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.console import Progress, TextWriter, show_summary
from xinfer.tasks.recording import recording, replay_command, write_json_stats
from xinfer.tasks.roofline import Roofline
from xinfer.tasks.streaming import Streaming

log = logging.getLogger(__name__)

DEFAULT_PROMPT = "Explain gravity in one sentence."


def run(config: Config, job: Job) -> int:
    """Generate, record, report; return the exit code."""
    session = Session(config, job.plugins)
    session.check()
    prompts = [replace(p, text=DEFAULT_PROMPT) if p.text is None and p.token_ids is None else p for p in job.prompts]
    prompts = prompts or [Prompt(DEFAULT_PROMPT)]
    requests = [(prompt, *session.encode(prompt), session.params_of(prompt)) for prompt in prompts]
    seed = session.params.seed if session.params.seed is not None else fresh_seed()
    record = RunRecord(job.folder if config.record.enabled else None, config.record.text, config.record.steps)
    with recording(record, job) as figures:
        generation = Generation(config, session, record, job)
        figures |= generation.start(seed)
        for prompt, ids, chat, params in requests:
            generation.add(prompt, ids, chat, params)
        try:
            generation.loop()
        finally:
            figures |= generation.figures()
    session.close()
    if config.json_stats is not None:
        write_json_stats(config.json_stats, figures)
    replay = None if record.folder is None else replay_command(record.folder, record.info)
    show_summary(figures, replay, record.folder)
    failed = [o for o in generation.outputs if o.finish_reason is FinishReason.ERROR]
    for output in failed:
        print(f"xinfer: request {output.index} failed: {output.error}", file=sys.stderr)
    return 3 if failed else 0


class Generation:
    """One run of the engine over the user's prompts."""

    def __init__(self, config: Config, session: Session, record: RunRecord, job: Job) -> None:
        self.config, self.session, self.record, self.job = config, session, record, job
        self.outputs: list[RequestOutput] = []
        self._queued: list[str] = []
        self._places: dict[int, int] = {}  # of each request's first text among all
        self._texts = 0
        self._going_on: set[int] = set()  # whose texts began elsewhere, and are shown once they are whole
        self.writer = TextWriter(sys.stdout, silent=config.bench_only)
        self.engine: Engine
        self._roofline, self._streaming = Roofline(), Streaming()
        self._started = perf_counter()

    def start(self, seed: int) -> dict[str, Any]:
        """Load the model and make the engine; return what is known before the first step."""
        with Progress("loading the model"):
            runner = self.session.runner
        self.provenance = Provenance(self.session.hashes())
        plugins = self.job.plugins.observers()
        observers = Observers(
            on_step=(self.record.step, self._roofline.add, self._streaming.add, *plugins.on_step),
            on_token=plugins.on_token,
            on_request_finished=(self.record.output, *plugins.on_request_finished),
        )
        self.engine = self.session.engine(seed, observers)
        self.record.update(seed=seed, greedy=self.session.params.greedy, **self.session.describe())
        return {
            "seed": seed,
            "sampling": _effective(self.session.params),
            "streaming": runner.info.stream_slots > 0,
            "resident_weight_bytes": runner.info.resident_weight_bytes,
            "kv_cache_bytes": runner.info.kv_cache_bytes,
            "device": runner.info.device,
            "dtype": runner.info.dtype,
        }

    def add(self, prompt: Prompt, ids: Sequence[int], chat: bool, params: SamplingParams, **known: Any) -> None:
        """Queue one prompt; what is known of it besides is for `Engine.add_request`."""
        request = self.engine.add_request(ids, params, timeout_s=self.config.engine.timeout_s, **known)
        self._queued.append(request.request_id)
        self._places[request.index] = self._texts - known.get("sample", 0)
        self._texts += params.n
        if known.get("output_token_ids"):
            self._going_on.add(request.index)
        text = {
            "prompt": prompt.text,
            "system": prompt.system,
            "stop": list(prompt.stop),
            "bad_words": list(prompt.bad_words),
            "chat": chat,
        }
        self.record.request(request, text)
        log.info("request queued", extra={"index": request.index, "prompt_tokens": len(ids), "chat": chat})

    def loop(self) -> None:
        """Step until all is done; show text as it comes."""
        self._started = perf_counter()
        most = sum((s.limit - s.num_prompt) * s.request.params.n for s in self.engine.scheduler.waiting)
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
            if token.request.index not in self._going_on:
                self.writer.write(self._places[token.request.index] + token.sample, token.text)
        for output in step.finished:
            self.outputs.append(output)
            whole = output.index in self._going_on
            self.writer.finish(self._places[output.index] + output.sample, output.text if whole else output.tail)
            stats = output.stats
            log.info(
                _ENDINGS[output.finish_reason],
                extra={
                    "index": output.index,
                    "sample": output.sample,
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
        if self.engine.speculator is not None:
            figures["speculation"] = self.engine.speculator.figures()
        info = self.session.runner.info
        return figures | {"roofline": self._roofline.figures(info), "stream": self._streaming.figures(info)}


_ENDINGS = {
    FinishReason.STOP: "end of sequence",
    FinishReason.LENGTH: "length reached",
    FinishReason.ABORT: "aborted",
    FinishReason.TIMEOUT: "time is over",
    FinishReason.ERROR: "request failed",
}


def _effective(params: SamplingParams) -> dict[str, Any]:
    values = {k: v for k, v in asdict(params).items() if k not in ("seed", "stop", "bad_words")}
    return values | {"summary": effective(params)}
