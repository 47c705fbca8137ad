"""Sweeps: every job in a process of its own, those that are done left out, and one report when all have ended."""

__all__ = ["JOB_ERROR", "Sweep", "SweepStart", "work_hash"]

import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import rich.box
import rich.table
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.markup import escape

from xinfer.errors import ConfigError, XinferError, nearest
from xinfer.flags import CommandLine, quote
from xinfer.hardware import gibibytes
from xinfer.records import redacted
from xinfer.records.page import number
from xinfer.records.summary import summary
from xinfer.records.sweep import EARLIER, SweepJob, SweepReport, read_job, write_job, write_sweep_report
from xinfer.tasks.console import console

JOB_ERROR = "XINFER_JOB_ERROR"  # names a file in which a job's process leaves what it failed of
_PATIENCE_S = 10  # for a job's process to end when the sweep is interrupted


class SweepStart(Callback):
    """What Hydra tells before the first job, in the process that the sweep was started in."""

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep the sweep's folder, and have every job see the same one, in whatever process a launcher starts it."""
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        SweepStart.folder = folder
        with open_dict(config):
            config.hydra.sweep.dir = str(folder)
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quote(str(folder))}")


@dataclass
class Sweep:
    """One command's sweep; launchers may copy it to other processes.

    Attributes:
        line: the command line.
        name: what tells its jobs from those that another command left in the same folder.
    """

    line: CommandLine
    name: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        SweepStart.folder = None

    def job(self, config: DictConfig) -> float | None:
        """Run a job, unless it is done already or another process is at it; return the figure `sweep.objective`."""
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        _redact(Path(hydra_config.sweep.dir) / "multirun.yaml")
        overrides = list(hydra_config.overrides.task)
        job = SweepJob(hydra_config.job.num, self.name, tuple(redacted(overrides)), work_hash(config, self.line))
        if "direction" in hydra_config.sweeper and config.sweep.objective is None:
            _refuse(folder, job, "sweep.objective must name the figure to look for the best of, such as tpot_ms")
            return None
        try:
            with FileLock(folder.parent / f".{folder.name}.lock", blocking=False):
                before = read_job(folder)
                if before is not None and _alive(before):
                    raise Timeout(str(folder))
                job = _done(folder, job, before) or self._run(folder, job, overrides)
        except Timeout:
            _say(f"{job.number}: {folder} is being written by another process, and left to it")
            return None
        return _objective(config, folder, job) if job.exit_code == 0 else None

    def _run(self, folder: Path, job: SweepJob, overrides: list[str]) -> SweepJob:
        write_job(folder, job)
        _say(f"{job.number}: {' '.join(job.overrides)}")
        try:
            code, error = _process(self.line, folder, job, overrides)
        except KeyboardInterrupt:
            write_job(folder, replace(job, exit_code=130, error="interrupted"))
            raise
        job = replace(job, exit_code=code, error=error)
        write_job(folder, job)
        if code:
            _say(f"job {job.number} ({' '.join(job.overrides)}) failed with exit code {code}")
        return job

    def finish(self) -> int:
        """Write and show the report, if any job began; return the highest exit code of this command's jobs."""
        folder = SweepStart.folder
        if folder is None:
            return 0
        _redact(folder / "multirun.yaml")
        if not any(folder.rglob("job.json")):
            return 0
        report = write_sweep_report(folder)
        _show(report)
        jobs = [row.job for row in report.rows if row.job.sweep == self.name]
        return max((XinferError.exit_code if job.exit_code is None else job.exit_code for job in jobs), default=0)


def _done(folder: Path, job: SweepJob, before: SweepJob | None) -> SweepJob | None:
    """Return the job as done, if its folder holds the same work, completed; put aside any other run there."""
    same = before is not None and before.exit_code == 0 and before.work == job.work is not None
    if same and summary(folder).status == "completed":
        job = replace(job, exit_code=0, skipped=True)
        write_job(folder, job)
        _say(f"{job.number}: done already")
        return job
    if (folder / "run.json").exists():
        _put_aside(folder)
    return None


def _alive(job: SweepJob) -> bool:
    """Whether a job's process runs, though the sweep that started it was killed."""
    if job.exit_code is not None or job.process is None:
        return False
    try:
        process = psutil.Process(job.process[0])
        return process.create_time() == job.process[1] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _process(line: CommandLine, folder: Path, job: SweepJob, overrides: list[str]) -> tuple[int, str | None]:
    """Run a job in a process of its own; return its exit code and what it failed of.

    Texts reach it through standard input, so that no command line or file shows them.
    """
    flags = [word for word in line.hydra if word not in ("-m", "--multirun")]
    command = [sys.executable, "-m", "xinfer", *flags, *overrides, f"hydra.run.dir={quote(str(folder))}"]
    lines = "".join(prompt.to_json() + "\n" for prompt in line.prompts)
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "error"
        process = subprocess.Popen(
            [*command, *(["--requests", "-"] if lines else [])],
            stdin=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {JOB_ERROR: str(said)},
        )
        try:
            write_job(folder, replace(job, process=(process.pid, psutil.Process(process.pid).create_time())))
            process.communicate(lines)
        except KeyboardInterrupt:
            _end(process)
            raise
        code = process.returncode
        if code < 0:
            return XinferError.exit_code, f"killed by signal {-code}" + " (out of memory?)" * (code == -9)
        error = " ".join(redacted(said.read_text("utf-8").split())) if said.exists() else f"exit code {code}"
        return code, error if code else None


def _end(process: subprocess.Popen[str]) -> None:
    """Let a process end its record; one that was not interrupted with us, or does not end, is made to."""
    ways: tuple[Callable[[], object], ...] = (process.poll, process.terminate, process.kill)
    for end in ways:
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
            return


def _put_aside(folder: Path) -> None:
    """Move a run that is to be replaced where the report does not look, but the index does."""
    sweep = Path(HydraConfig.get().sweep.dir)
    name = folder.relative_to(sweep) if folder.is_relative_to(sweep) else Path(folder.name)
    target = sweep / EARLIER / f"{name}-{secrets.token_hex(3)}"
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)
    folder.mkdir()


def work_hash(config: DictConfig, line: CommandLine) -> str | None:
    """Return a hash of a job's configuration and texts; None where no trace of texts is to be kept."""
    if config.record.text == "off":
        return None
    settings: Any = redacted(OmegaConf.to_container(config, resolve=True))
    texts = [prompt.to_json() for prompt in line.prompts]
    return hashlib.sha256(json.dumps([settings, texts], sort_keys=True, default=str).encode()).hexdigest()


def _objective(config: DictConfig, folder: Path, job: SweepJob) -> float | None:
    name = config.sweep.objective
    if name is None:
        return None
    figures = summary(folder).figures if (folder / "run.json").exists() else {}
    if name in figures:
        return figures[name]
    hint = nearest(name, figures) or (f" (there are: {', '.join(figures)})" if figures else " (it left none)")
    _refuse(folder, job, f"sweep.objective={name!r} is no figure of it{hint}")
    return None


def _refuse(folder: Path, job: SweepJob, error: str) -> None:
    write_job(folder, replace(job, exit_code=ConfigError.exit_code, error=error))
    _say(f"job {job.number}: {error}")


def _say(message: str) -> None:
    print("xinfer: " + " ".join(message.split()), file=sys.stderr, flush=True)


def _figure(name: str, value: float | None) -> str:
    return gibibytes(value) if name.endswith("_bytes") and value is not None else number(value)


def _redact(path: Path) -> None:
    """Hide the secrets in a file that Hydra has written."""
    if path.is_file():
        content = OmegaConf.to_container(OmegaConf.load(path))
        if (hidden := redacted(content)) != content:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            OmegaConf.save(OmegaConf.create(hidden), temporary)
            temporary.replace(path)


def _show(report: SweepReport) -> None:
    """Print a table of the jobs on standard error, and where the report is."""
    page = console(stderr=True)
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for name in ("job", *report.keys, "status"):
        table.add_column(escape(name), overflow="fold")
    for name in report.figures:
        table.add_column(escape(name), justify="right")
    for row in report.rows:
        status = "done already" if row.job.skipped else row.job.status
        settings = [row.job.settings.get(key, "") for key in report.keys]
        figures = [_figure(name, row.figures.get(name)) for name in report.figures]
        table.add_row(*map(escape, (str(row.job.number), *settings, status, *figures)))
    page.print(table, soft_wrap=False)
    for row in report.rows:
        if row.job.error:
            page.print(f"job {row.job.number}: {row.job.error}", markup=False)
    folder = report.folder.relative_to(Path.cwd()) if report.folder.is_relative_to(Path.cwd()) else report.folder
    page.print(f"report  {folder / 'report.html'}", markup=False)
    if any(row.job.exit_code for row in report.rows):
        page.print(f"resume  the same command with --resume {folder} runs what is not completed", markup=False)
