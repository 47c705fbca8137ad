"""A sweep's folder: what became of each of its jobs, and one report over all of them."""

__all__ = ["JobRow", "SweepJob", "SweepReport", "read_job", "write_job", "write_sweep_report"]

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xinfer.errors import UsageError
from xinfer.records.page import write_page
from xinfer.records.pareto import Scatter, scatter
from xinfer.records.record import write_json
from xinfer.records.summary import RunSummary, read_object, summary

EARLIER = "earlier"  # the folder within a sweep's where runs are kept that a rerun has replaced
QUALITY = ("kl", "perplexity")  # figures that tell how good an answer is, less being better
_FIGURES = (
    "tok_s",
    "output_tok_s",
    "prefill_tok_s",
    "ttft_ms",
    "generated_tokens",
    "peak_memory_bytes",
    "resident_weight_bytes",
)
_STATUS = {0: "completed", 1: "check failed", 2: "refused", 130: "interrupted", None: "not finished"}


@dataclass(frozen=True, slots=True)
class SweepJob:
    """What a sweep knows of one of its jobs, kept as job.json in the job's folder.

    Attributes:
        number: its place in the sweep.
        sweep: of the command that ran it, or found it done; the same for all of a command's jobs.
        overrides: its command line, secrets redacted.
        work: a hash of configuration and texts, by which a rerun finds that it is done; None where that can't be told.
        exit_code: None until it has ended.
        error: what it failed of.
        skipped: whether it was found done.
        process: number and time of start of the process that runs it, which may outlive the sweep's; None until then.
    """

    number: int
    sweep: str
    overrides: tuple[str, ...]
    work: str | None = None
    exit_code: int | None = None
    error: str | None = None
    skipped: bool = False
    process: tuple[int, float] | None = None

    @property
    def status(self) -> str:
        """How it ended, in a word or two."""
        return _STATUS.get(self.exit_code, "failed")

    @property
    def settings(self) -> dict[str, str]:
        """Its overrides by their keys."""
        pairs = (override.lstrip("+~").partition("=") for override in self.overrides)
        return {key: value for key, _, value in pairs}


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in the report: where it lies in the sweep's folder, its run, if it left one, and whether it has a page."""

    folder: str
    job: SweepJob
    run: RunSummary | None
    has_page: bool

    @property
    def figures(self) -> Mapping[str, float]:
        """What it measured; nothing of a job that failed, for that would not be comparable."""
        return self.run.figures if self.run is not None and self.job.exit_code in (0, 1) else {}

    @property
    def quality(self) -> tuple[str, float] | None:
        """The first figure that tells of quality, with its name."""
        found = ((name, value) for name, value in self.figures.items() if name.rpartition(".")[2] in QUALITY)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """All jobs of a sweep's folder.

    Attributes:
        keys: the settings that differ between jobs.
        figures: those that a table shows, of those that any job has.
        pictures: speed against memory and against quality, where jobs have them.
    """

    folder: Path
    rows: list[JobRow]
    keys: list[str]
    figures: list[str]
    pictures: list[Scatter]


def write_job(folder: Path, job: SweepJob) -> None:
    """Write job.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "job.json", asdict(job))


def read_job(folder: Path) -> SweepJob | None:
    """Read job.json; None where there is none that can be read."""
    try:
        found = read_object(folder / "job.json")
        number, start = found.get("process") or (0, 0.0)
        return SweepJob(
            **found
            | {"number": int(found["number"]), "overrides": tuple(map(str, found["overrides"]))}
            | {"process": (int(number), float(start)) if number else None}
        )
    except (UsageError, KeyError, TypeError, ValueError):
        return None


def write_sweep_report(folder: Path) -> SweepReport:
    """Write report.html, sweep.json and sweep.csv over the jobs in a sweep's folder, and return what they tell."""
    rows = sorted(_rows(folder), key=lambda row: row.job.number)
    report = SweepReport(folder, rows, _varying(rows), _shown(rows), _pictures(rows))
    write_json(folder / "sweep.json", _plain(report))
    _write_csv(folder / "sweep.csv", report)
    write_page(folder / "report.html", "sweep.html.j2", report=report)
    return report


def _rows(folder: Path) -> list[JobRow]:
    found = []
    for path in folder.rglob("job.json"):
        place = path.parent.relative_to(folder)
        if place.parts[:1] != (EARLIER,) and (job := read_job(path.parent)) is not None:
            run = summary(path.parent) if (path.parent / "run.json").exists() else None
            found.append(JobRow(place.as_posix(), job, run, (path.parent / "report.html").exists()))
    return found


def _varying(rows: Sequence[JobRow]) -> list[str]:
    settings = [row.job.settings for row in rows]
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len(rows) == 1 or any(one.get(key) != settings[0].get(key) for one in settings)]


def _shown(rows: Sequence[JobRow]) -> list[str]:
    there = {name for row in rows for name in row.figures}
    return [*(name for name in _FIGURES if name in there), *dict.fromkeys(q[0] for row in rows if (q := row.quality))]


def _pictures(rows: Sequence[JobRow]) -> list[Scatter]:
    """Draw speed against memory and quality: of jobs with several requests what all of them got together."""
    together = any(row.figures.get("requests", 1) > 1 for row in rows)
    speed, unit = ("output_tok_s", "tokens/s, all requests") if together else ("tok_s", "tokens/s")
    fast = [row for row in rows if speed in row.figures]

    def points(values: Sequence[float | None]) -> list[tuple[float, float, str, str]]:
        return [
            (value, row.figures[speed], str(row.job.number), _title(row))
            for row, value in zip(fast, values, strict=True)
            if value is not None
        ]

    qualities = [row.quality for row in fast]
    names = {quality[0] for quality in qualities if quality is not None}
    memory = scatter(points([r.figures.get("peak_memory_bytes") for r in fast]), "peak memory, GiB", unit, 2**30)
    quality = scatter(points([q[1] if q else None for q in qualities]), ", ".join(sorted(names)), unit)
    return [picture for picture in (memory, quality if len(names) == 1 else None) if picture is not None]


def _title(row: JobRow) -> str:
    return f"job {row.job.number}: {' '.join(row.job.overrides)}"


def _plain(report: SweepReport) -> dict[str, Any]:
    jobs = [
        asdict(row.job)
        | {"folder": row.folder, "status": row.job.status, "settings": row.job.settings, "figures": dict(row.figures)}
        for row in report.rows
    ]
    return {"schema": 1, "varying": report.keys, "jobs": jobs}


def _write_csv(path: Path, report: SweepReport) -> None:
    figures = sorted({name for row in report.rows for name in row.figures})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", "folder", "status", *report.keys, *figures, "error"])
    for row in report.rows:
        settings = [row.job.settings.get(key, "") for key in report.keys]
        values = [row.figures.get(name, "") for name in figures]
        writer.writerow([row.job.number, row.folder, row.job.status, *settings, *values, row.job.error or ""])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text.getvalue(), "utf-8")
    os.replace(temporary, path)
