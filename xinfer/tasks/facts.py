"""What a recorded run rests on, beside what is here: each difference by its name."""

__all__ = ["Difference", "differences"]

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xinfer
from xinfer import hardware
from xinfer.config import Config
from xinfer.records import redacted
from xinfer.records.provenance import git_state
from xinfer.records.reader import RecordedRun
from xinfer.session import Session
from xinfer.tasks import Job

_MACHINE = ("cpu", "logical_cores", "threads", "instruction_sets", "torch_kernels", "platform", "gpus")
_NOT_OF_TOKENS = {"task", "run", "request", "sample", "json", "json_stats", "bench_only", "log", "record"}
_MISSING = "-"


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact of which a run and this process have different values; `kind` says of what."""

    kind: str
    name: str
    recorded: str
    here: str


def differences(run: RecordedRun, session: Session, config: Config, job: Job) -> list[Difference]:
    """Return what differs: the model's hashes first, then what is configured, code, versions and the machine."""
    info, machine = run.info, asdict(hardware.describe())
    told = info.get("hashes")
    hashes = {name: compute() for name, compute in session.hashes().items()}
    found = list(_different("hash", told, hashes)) if told is not None else []
    settings = [_settings(each) for each in (info.get("config") or {}, redacted(asdict(config)))]
    if len({each.get("backend.name") for each in settings}) == 2:  # what else there is of each is its own
        settings = [
            {k: v for k, v in each.items() if k == "backend.name" or not k.startswith("backend.")} for each in settings
        ]
    found += _different("setting", *settings)
    git = git_state(Path(xinfer.__file__).parent)
    found += _different("code", _code(info.get("git")), _code(git))
    found += _different("version", info.get("versions") or {}, hardware.versions())
    plugins = [{each["name"]: each["version"] for each in info.get("plugins") or ()}]
    plugins.append({each.name: each.version for each in job.plugins.loaded})
    found += _different("plugin", *plugins)
    recorded = info.get("hardware") or {}
    return [
        *found,
        *_different("machine", *({name: each.get(name) for name in _MACHINE} for each in (recorded, machine))),
    ]


def _different(kind: str, recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**recorded, **here}:
        texts = [_MISSING if (value := each.get(name)) is None else _shown(value) for each in (recorded, here)]
        if texts[0] != texts[1]:
            yield Difference(kind, name, *texts)


def _shown(value: Any) -> str:
    return " ".join(map(_shown, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _code(git: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"commit": f"{git['commit'][:12]}{' and changes' if git['dirty'] else ''}"} if git else {}


def _settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return by dotted key what tokens might depend on; empty mappings count as nothing."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if prefix or (name not in _NOT_OF_TOKENS and name not in _OF_TASKS):
            found |= _settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


_OF_TASKS = {name for name, value in vars(Config()).items() if type(value).__module__ == "xinfer.task_configs"}
