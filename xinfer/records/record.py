"""Writing a run's folder as the run goes, so that it can be read whenever and however the run ends."""

__all__ = ["HIDDEN", "Run", "RunRecord", "redacted"]

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import IO, Any

from xinfer.engine.outputs import RequestOutput, StepOutput
from xinfer.engine.types import Request, TokenLogprobs
from xinfer.errors import ConfigError

SCHEMA = 1
_ROTATE = 64 << 20  # bytes of steps.jsonl, after which it becomes steps.1.jsonl and a new one begins
HIDDEN = "<redacted>"
_SECRET = re.compile(r"(token|secret|password|passwd|credential|api_?key|access_?key)s?$", re.IGNORECASE)
_COUNT = re.compile(r"[0-9]+(,[0-9]+)*|true|false|null", re.IGNORECASE)  # of a sweep: several


@dataclass(frozen=True, slots=True)
class Run:
    """A run as plugins see it: what run.json says at this moment, and the figures once it has ended."""

    folder: Path | None
    info: Mapping[str, Any]
    stats: Mapping[str, Any] = field(default_factory=dict)


class RunRecord:
    """One run's folder. Every line is on disk when its call returns; run.json is replaced whole.

    Args:
        folder: where it goes; None keeps no record, and every call does nothing.
        text: `full`, `hash`, or `off`: what of prompts, answers and token ids is kept.
        steps: `all`, `sample`, or `off`.
        clock: the engine's.

    Attributes:
        info: what run.json says.
        has_requests: whether there was any.
    """

    def __init__(
        self,
        folder: Path | None,
        text: str = "full",
        steps: str = "all",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        _one_of("record.text", text, ("full", "hash", "off"))
        _one_of("record.steps", steps, ("all", "sample", "off"))
        self.folder, self._text, self._steps = folder, text, steps
        self._started, self._clock, self._began = datetime.now(UTC), clock, clock()
        self._requests: IO[str] | None = None
        self._step_lines: IO[str] | None = None
        self.has_requests = False
        self.info: dict[str, Any] = {"schema": SCHEMA, "status": "running", "started": self._started.isoformat()}
        if folder is not None:
            if (folder / "run.json").exists():
                raise ConfigError(f"{folder} already holds a run: name another folder")
            folder.mkdir(parents=True, exist_ok=True)
            self.info["id"] = folder.name
            self._requests = _append(folder / "requests.jsonl")
            self._step_lines = _append(folder / "steps.jsonl") if steps != "off" else None

    def update(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.info |= facts
        if self.folder is not None:
            write_json(self.folder / "run.json", self.info)

    def request(self, request: Request, prompt: Mapping[str, Any]) -> None:
        """Note a request as it is queued; `prompt` is its text as the user gave it."""
        self.has_requests = True
        if self._requests is not None:
            entry = {
                "event": "request",
                "index": request.index,
                "time": self._since_start(self._clock()),
                **{name: self._private(value) for name, value in prompt.items() if name != "chat"},
                "chat": prompt.get("chat"),
                "seed": request.seed,
                "params": {k: v for k, v in asdict(request.params).items() if k not in ("seed", "stop", "bad_words")},
                "prompt_token_ids": self._private(list(request.prompt_token_ids)),
            }
            _line(self._requests, entry)

    def output(self, output: RequestOutput) -> None:
        """Note a result."""
        if self._requests is not None:
            entry = {
                "event": "output",
                "index": output.index,
                "sample": output.sample,
                "time": self._since_start(output.history[-1][1]),
                "finish_reason": output.finish_reason,
                "error": output.error,
                "text": self._private(output.text),
                "token_ids": self._private(list(output.token_ids)),
                "logprobs": self._private(_plain(output.logprobs)),
                "prompt_logprobs": self._private(_plain(output.prompt_logprobs)),
                "history": [(state, self._since_start(when)) for state, when in output.history],
                "stats": asdict(output.stats),
            }
            _line(self._requests, entry)

    def step(self, output: StepOutput) -> None:
        """Note a step."""
        stats = output.stats
        if self._step_lines is None or (self._steps == "sample" and stats.step >= 100 and stats.step % 10):
            return
        _line(self._step_lines, asdict(stats) | {"time": self._since_start(stats.time)})
        if self.folder is not None and self._step_lines.tell() > _ROTATE:
            self._step_lines.close()
            number = 1 + len(list(self.folder.glob("steps.*.jsonl")))
            os.replace(self.folder / "steps.jsonl", self.folder / f"steps.{number}.jsonl")
            self._step_lines = _append(self.folder / "steps.jsonl")

    def finish(self, status: str, stats: Mapping[str, Any]) -> None:
        """Write the figures and how the run ended: `completed`, `failed`, or `interrupted`."""
        for stream in (self._requests, self._step_lines):
            if stream is not None:
                stream.close()
        if self.folder is not None:
            write_json(self.folder / "stats.json", stats)
        duration = self._clock() - self._began
        self.update(status=status, ended=datetime.now(UTC).isoformat(), duration_s=duration)

    def discard(self) -> None:
        """Remove the folder, of a run that was refused before it computed anything."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def run(self, stats: Mapping[str, Any] | None = None) -> Run:
        """Return the run as it is now, for plugins; they get a copy."""
        return Run(self.folder, json.loads(json.dumps(self.info, default=str)), dict(stats or {}))

    def _since_start(self, when: float) -> float:
        return round(when - self._began, 6)

    def _private(self, value: Any) -> Any:
        """Return what may be kept of a text or of token ids, which tell the text."""
        if self._text == "full" or value is None:
            return value
        if self._text == "off":
            return None
        return {"sha256": hashlib.sha256(json.dumps(value).encode()).hexdigest()}


def _plain(logprobs: tuple[TokenLogprobs | None, ...] | None) -> list[Any] | None:
    return None if logprobs is None else [None if token is None else asdict(token) for token in logprobs]


def redacted(config: Any) -> Any:
    """Return a config with every value hidden whose key sounds like a secret, in `key=value` overrides too."""
    if isinstance(config, dict):
        return {k: HIDDEN if _secret(k, v) and v is not None else redacted(v) for k, v in config.items()}
    if isinstance(config, list | tuple):
        return [redacted(value) for value in config]
    key, equals, value = config.partition("=") if isinstance(config, str) else ("", "", "")
    return f"{key}={HIDDEN}" if equals and _secret(key.rpartition(".")[2], value) else config


def _secret(key: object, value: object) -> bool:
    """Whether a value is not to be shown: its key sounds like it. `tokens` with numbers are counted, not secret."""
    if not isinstance(key, str) or not _SECRET.search(key):
        return False
    return not (key.endswith("tokens") and _COUNT.fullmatch(str(value)))


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file whole, so that no reader ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, path)


def _append(path: Path) -> IO[str]:
    return path.open("a", encoding="utf-8", buffering=1)


def _line(stream: IO[str], entry: Any) -> None:
    stream.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown (there are: {', '.join(choices)})")
