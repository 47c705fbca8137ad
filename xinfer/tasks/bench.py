"""`python -m xinfer bench`: how fast the engine is on this machine, and whether it got slower."""

__all__ = ["run"]

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xinfer.config import Config
from xinfer.errors import ConfigError, UsageError
from xinfer.records import RunRecord
from xinfer.records.bench_gate import Gate, differences, judge
from xinfer.records.bench_samples import Side, read_sides, write_sides
from xinfer.records.bench_summary import summary
from xinfer.tasks import Job
from xinfer.tasks.bench_page import comparison_lines, table
from xinfer.tasks.bench_process import follow
from xinfer.tasks.bench_run import Bench
from xinfer.tasks.bench_sides import in_processes, measurers, take_turns
from xinfer.tasks.bench_work import plan
from xinfer.tasks.console import Progress, console
from xinfer.tasks.recording import recording


def run(config: Config, job: Job) -> int:
    """Measure, and print a Markdown table on standard output, and below it what a comparison came to.

    Returns the exit code: 1 if it got slower than what it was to be held to, or needs more memory without a reason; 3
    if requests failed. What can't be compared is refused before anything is measured.
    """
    plan(config.bench)
    if config.bench.follow:
        return follow(Bench(config, job.plugins))
    _check(config)
    record = RunRecord(job.folder if config.record.enabled else None, config.record.text, "off")
    with recording(record, job) as figures:
        sides, old = _measured(config, job)
        gate = None if old is None else _judged(sides[0], old, config)
        figures |= _figures(sides, gate)
        _write(config, record, sides, gate)
    failed = [f"{side.label}, {line}" for side in sides for line in _failures(side)]
    _show(sides, old, gate, record)
    for line in failed:
        print(f"xinfer: {line}", file=sys.stderr)
    return 3 if failed else int(_gates(config) and gate is not None and gate.failed)


def _check(config: Config) -> None:
    bench = config.bench
    if not bench.max_regression >= 0 or not bench.floor_ms >= 0:
        raise ConfigError(
            f"bench.max_regression={bench.max_regression}, bench.floor_ms={bench.floor_ms}: both are numbers from 0 on"
        )
    if bench.baseline is not None and (in_processes(config) or bench.against or bench.against_overrides):
        raise ConfigError("bench.baseline compares with a file, bench.against... with what runs now: give one of them")


def _gates(config: Config) -> bool:
    """Whether being slower fails; against another backend it is only told."""
    return config.bench.baseline is not None or in_processes(config)


def _measured(config: Config, job: Job) -> tuple[list[Side], Side | None]:
    """Measure; return the sides, and the one that the first is to be compared with, which may be a file's."""
    bench, works = config.bench, plan(config.bench)
    old = None if bench.baseline is None else read_sides(Path(bench.baseline).expanduser())[0]
    with ExitStack() as stack:
        measuring = measurers(config, job)
        for one in measuring:
            stack.callback(one.close)
        with Progress("loading the model"):
            sides = [one.load() for one in measuring]
        if old is not None:
            there = {(m.shape, m.batch) for m in old.measured}
            lacks = [f"{w.shape} batch {w.batch} is not in it" for w in works if (w.shape, w.batch) not in there]
            _check_comparable(f"{bench.baseline}", [*differences(sides[0].facts, old.facts), *lacks])
        if in_processes(config):
            _check_comparable("the other version", differences(sides[0].facts, sides[1].facts, ignore=("versions",)))
        for work in works:
            with Progress(f"{work.shape} batch {work.batch}"):
                found = take_turns(measuring, work, warmup=bench.warmup, repeats=bench.repeats)
            for side, measured in zip(sides, found, strict=True):
                side.measured.append(measured)
    return sides, old if old is not None or len(sides) == 1 else sides[1]


def _check_comparable(what: str, found: list[str]) -> None:
    if found:
        raise UsageError(f"not comparable with {what}: {'; '.join(found)}: measure both alike")


def _judged(new: Side, old: Side, config: Config) -> Gate:
    bench = config.bench
    return judge(
        new,
        old,
        paired=bench.baseline is None,
        max_regression=bench.max_regression if _gates(config) else None,
        floor_ms=bench.floor_ms,
        reason=bench.reason,
    )


def _figures(sides: list[Side], gate: Gate | None) -> dict[str, Any]:
    """Return what stats.json says: vLLM's names for latencies, and what both sides are."""
    figures: dict[str, Any] = {
        "sides": [
            {
                "backend": side.facts["backend.name"],
                "model_id": side.facts["model.name"],
                "dtype": side.facts["model.dtype"],
                "quantization": side.facts["model.quantization"],
                **side.build,
                **side.resources,
                "tests": [summary(measured) for measured in side.measured],
            }
            for side in sides
        ]
    }
    return figures | {"gate": None if gate is None else asdict(gate) | {"verdict": gate.verdict}}


def _write(config: Config, record: RunRecord, sides: list[Side], gate: Gate | None) -> None:
    told = None if gate is None else asdict(gate) | {"verdict": gate.verdict}
    if record.folder is not None:
        write_sides(record.folder / "bench.json", sides, gate=told)
    if (target := config.bench.save_baseline) is not None:
        try:
            write_sides(Path(target).expanduser(), sides, gate=told)
        except OSError as error:
            raise UsageError(f"bench.save_baseline={target!r}: can't be written ({error.strerror})") from error


def _failures(side: Side) -> list[str]:
    lines = []
    for measured in side.measured:
        figures = summary(measured)
        if count := figures["failed"]:
            every = count + figures["completed"]
            errors = "; ".join(figures["errors"])
            lines.append(f"{measured.name}: {count} of {every} requests failed, and count for no latency: {errors}")
    return lines


def _show(sides: list[Side], old: Side | None, gate: Gate | None, record: RunRecord) -> None:
    page = console()
    page.print(table(sides), markup=False)
    if gate is not None and old is not None:
        page.print("")
        for line in comparison_lines(sides[0], old, gate):
            page.print(line, markup=False)
    if record.folder is not None:
        console(stderr=True).print(f"record  {record.folder}", markup=False)
