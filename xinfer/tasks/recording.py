"""A task's run around its work: what is written when it begins, and however it ends; and how to run it again."""

__all__ = ["recording", "replay_command", "write_json_stats"]

import json
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from xinfer import hardware
from xinfer.errors import UsageError, XinferError
from xinfer.logs import log_to_file
from xinfer.processes import count
from xinfer.records import RunRecord, redacted, write_report
from xinfer.tasks import Job

log = logging.getLogger(__name__)


@contextmanager
def recording(record: RunRecord, job: Job) -> Iterator[dict[str, Any]]:
    """Keep a run's log and hooks, and its end, however it ends; yields the figures, to be filled in.

    A run that is completed has a report of its requests before plugins hear of its end; one that is refused before it
    computed anything (a `UsageError`) leaves no folder.
    """
    figures: dict[str, Any] = {}
    record.update(
        task=job.resolved["task"],
        command=[*_program(), *redacted(job.overrides)],
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
    except Exception as error:
        record.update(error=" ".join(f"{type(error).__name__}: {error}".split()))
        if handler is not None:  # the user gets one line; where it came from is for the record
            handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "the run failed", (), sys.exc_info()))
        raise
    finally:
        if job.plugins.silenced:
            record.update(silenced_plugins=dict(job.plugins.silenced))
        record.finish(status, figures)
        if status == "completed" and record.folder is not None and record.has_requests:
            write_report(record.folder)
        job.plugins.tell("xinfer_on_run_end", record.run(figures))
        if handler is not None:
            logging.getLogger("xinfer").removeHandler(handler)
            handler.close()
        if status == "refused":
            record.discard()


def _write_hydra_files(folder: Path, job: Job) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in (("config", job.resolved), ("hydra", job.hydra), ("overrides", job.overrides)):
        OmegaConf.save(OmegaConf.create(redacted(content)), folder / f"{name}.yaml")


def _program() -> list[str]:
    """Return what starts xinfer as it was started."""
    processes = count()
    started = ["python"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes)]
    return [*started, "-m", "xinfer"]


def replay_command(folder: Path, info: Mapping[str, Any]) -> str | None:
    """Return the command that runs a recorded run again and verifies it; None where the record does not hold the texts.

    That of a task without requests is its own command.
    """
    words = [str(word) for word in info.get("command") or ()]
    if "xinfer" not in words:
        return None
    if info.get("task") not in ("generate", "replay"):
        return shlex.join(words)
    if ((info.get("config") or {}).get("record") or {}).get("text") != "full":
        return None
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return shlex.join([*words[: words.index("xinfer") + 1], "replay", str(shown)])


def write_json_stats(target: str, figures: dict[str, Any]) -> None:
    """Write a run's figures as one line of JSON, to standard error for `-`, else to a file."""
    line = json.dumps(figures, default=str)
    if target == "-":
        print(line, file=sys.stderr)
        return
    try:
        Path(target).expanduser().write_text(line + "\n", "utf-8")
    except OSError as error:
        raise XinferError(f"json_stats={target!r}: can't be written ({error.strerror})") from error
