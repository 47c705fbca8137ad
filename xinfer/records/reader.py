"""Reading a run's folder back, also that of a run that died in the middle of a line."""

__all__ = ["RecordedRun", "read_run"]

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.errors import UsageError

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as its folder tells it.

    Attributes:
        info: run.json.
        stats: stats.json; empty if the run never ended.
        requests: by index, as they were queued.
        outputs: by index, the first sample of those that ended.
        samples: all that ended, in that order: a request with n > 1 has n of them.
        steps: in order.
    """

    folder: Path
    info: Entry
    stats: Entry
    requests: dict[int, Entry]
    outputs: dict[int, Entry]
    steps: list[Entry]
    samples: list[Entry]

    def samples_of(self, index: int) -> list[Entry]:
        """Return those samples of a request that ended, in their order."""
        return sorted((s for s in self.samples if s["index"] == index), key=lambda sample: int(sample.get("sample", 0)))

    @property
    def status(self) -> str:
        """How it ended; `running` also for a run that was killed."""
        return str(self.info.get("status", "unknown"))


def read_run(folder: Path) -> RecordedRun:
    """Read a run's folder; one that is none is a `UsageError`."""
    try:
        info = json.loads((folder / "run.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is no run folder: its run.json can't be read ({error})") from error
    stats = folder / "stats.json"
    entries = list(_lines(folder / "requests.jsonl"))
    requests = {entry["index"]: entry for entry in entries if entry["event"] == "request"}
    samples = [entry for entry in entries if entry["event"] == "output"]
    outputs = {entry["index"]: entry for entry in samples if not entry.get("sample")}
    rotated = sorted(folder.glob("steps.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    steps = [entry for path in (*rotated, folder / "steps.jsonl") for entry in _lines(path)]
    figures = json.loads(stats.read_text("utf-8")) if stats.exists() else {}
    return RecordedRun(folder, info, figures, requests, outputs, steps, samples)


def _lines(path: Path) -> Iterator[Entry]:
    """Yield a file's lines; the last one may be damaged, for the process or the machine may have ended within it."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                if next(stream, None) is None:
                    return
                raise UsageError(f"{path}: line {number} is damaged, and not the last one ({error})") from error
            if line.endswith("\n"):
                yield entry
