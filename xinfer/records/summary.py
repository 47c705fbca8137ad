"""What a run's folder comes to in one line: what ran, how it ended, and its figures; without texts."""

__all__ = ["RunSummary", "flat", "is_run", "numbers", "overrides", "read_object", "summary"]

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xinfer.errors import UsageError

_MOST_BYTES = 16 << 20  # of a run.json or stats.json; more is no record of ours, and not read


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in one line.

    Attributes:
        folder: as it was named, with slashes.
        started: in UTC, so that texts sort as times do; None where the record does not say.
        status: completed, failed, interrupted, running (also of a run that was killed), or damaged.
        model: its reference.
        quantization: as configured; None where weights are as they are.
        seed: as text, since it may have 64 bits.
        overrides: what was changed on the command line, secrets redacted.
        figures: every number of stats.json by its name, those within others as `roofline.share`; and `tok_s`, which is
            1000 / `tpot_ms`.
        problem: what of the folder can't be read.
    """

    folder: str
    started: str | None = None
    status: str = "damaged"
    task: str | None = None
    model: str | None = None
    backend: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    device: str | None = None
    seed: str | None = None
    overrides: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None

    @property
    def computes(self) -> str:
        """Backend and precision, as in `onnx float32 int4`."""
        return " ".join(filter(None, (self.backend, self.dtype, self.quantization)))

    @property
    def model_name(self) -> str:
        """The last part of the model's reference."""
        return (self.model or "").partition("#")[0].rstrip("/").rpartition("/")[2]


def is_run(names: Sequence[str]) -> bool:
    """Whether a folder with these files in it is a run's, or the beginning of one's."""
    return "run.json" in names or "requests.jsonl" in names


def summary(folder: Path) -> RunSummary:
    """Return a run's summary; where the folder is damaged, with what is left of it and the problem."""
    name = folder.as_posix()
    try:
        info = read_object(folder / "run.json")
    except UsageError as error:
        return RunSummary(name, problem=_text(error))
    problem: str | None = None
    stats: dict[str, Any] = {}
    try:
        stats = read_object(folder / "stats.json") if (folder / "stats.json").exists() else {}
    except UsageError as error:
        problem = _text(error)
    config = _objects(info, "config")
    return RunSummary(
        folder=name,
        started=_utc(info.get("started")),
        status=_text(info.get("status")) or "unknown",
        task=_text(info.get("task")),
        model=_text(_objects(info, "model").get("reference") or _objects(config, "model").get("reference")),
        backend=_text(_objects(config, "backend").get("name")),
        dtype=_text(_objects(info, "runner").get("dtype")),
        quantization=_text(_objects(config, "model").get("quantization")),
        device=_text(_objects(info, "runner").get("device")),
        seed=_text(info.get("seed")),
        overrides=overrides(info),
        figures=numbers(stats),
        problem=problem,
    )


def overrides(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a run's command changed, from its run.json."""
    command = info.get("command")
    words = [_text(word) or "" for word in command] if isinstance(command, list) else []
    return tuple(words[words.index("xinfer") + 1 :]) if "xinfer" in words else ()


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; one that can't be read is a `UsageError` that says why."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB, and is not read")
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged (it holds no object)")
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in a tree of objects, by dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def numbers(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among figures by dotted names, settings and what is not finite left out; and `tok_s`."""
    measured = {name: value for name, value in stats.items() if name not in ("sampling", "seed")}
    found = {
        name: value
        for name, value in flat(measured)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    }
    return found | ({"tok_s": 1000 / found["tpot_ms"]} if found.get("tpot_ms") else {})


def _objects(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _text(value: object) -> str | None:
    """Return a value as text that can be written anywhere: JSON can hold halves of characters."""
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def _utc(when: object) -> str | None:
    try:
        return datetime.fromisoformat(str(when)).astimezone(UTC).isoformat(timespec="microseconds")
    except ValueError:
        return None
