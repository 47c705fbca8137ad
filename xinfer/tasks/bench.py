"""`python -m xinfer bench`: how fast the engine is on this machine, and whether it got slower."""

__all__ = ["run"]

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xinfer.config import Config
from xinfer.errors import ConfigError, UsageError, XinferError
from xinfer.records import RunRecord
from xinfer.records.bench_gate import Gate, differences, judge
from xinfer.records.bench_samples import Side, read_sides, write_sides
from xinfer.records.bench_summary import summary
from xinfer.tasks import Job
from xinfer.tasks.bench_page import comparison_lines, table
from xinfer.tasks.bench_process import follow
from xinfer.tasks.bench_run import Bench
from xinfer.tasks.bench_sides import Measurer, in_processes, measurers, take_turns
from xinfer.tasks.bench_work import Work, plan
from xinfer.tasks.console import Progress, console
from xinfer.tasks.recording import recording, write_json_stats


def run(config: Config, job: Job) -> int:
    """Measure, and print a Markdown table on standard output, and below it what a comparison came to.

    Returns the exit code: 1 if it got slower than what it was to be held to, or needs more memory without a reason; 3
    if requests failed. What can't be compared is refused before anything is measured.
    """
    works = plan(config.bench)
    if config.bench.follow:
        return follow(Bench(config, job.plugins))
    _check(config, job)
    record = RunRecord(job.folder if config.record.enabled else None, config.record.text, "off")
    with recording(record, job) as figures, ExitStack() as stack:
        measuring = measurers(config, job)
        for one in measuring:
            stack.callback(one.close)
        with Progress("loading the model"):
            sides = [one.load() for one in measuring]
        old = _compared_with(sides, works, config)
        for work in works:
            _measure(work, sides, measuring, config)
            if record.folder is not None:  # what breaks off keeps what was measured
                write_sides(record.folder / "bench.json", sides)
        gate = None if old is None else _judged(sides[0], old, config)
        figures |= _figures(sides, gate)
        _save(config, record, sides, gate)
    _show(sides, old, gate, record)
    if config.json_stats is not None:
        write_json_stats(config.json_stats, figures)
    failed = [f"{side.label}, {line}" for side in sides for line in _failures(side)]
    for line in failed:
        print(f"xinfer: {line}", file=sys.stderr)
    return 3 if failed else int(gate is not None and gate.failed)


def _check(config: Config, job: Job) -> None:
    """Refuse what makes no sense before any work."""
    bench = config.bench
    if job.prompts:
        raise ConfigError("bench measures random token ids of given numbers: leave prompts out")
    if not bench.max_regression >= 0 or not bench.floor_ms >= 0:
        raise ConfigError(
            f"bench.max_regression={bench.max_regression}, bench.floor_ms={bench.floor_ms}: both are numbers from 0 on"
        )
    if bench.save_baseline is not None and not Path(bench.save_baseline).expanduser().parent.is_dir():
        raise ConfigError(f"bench.save_baseline={bench.save_baseline!r}: its folder is not there: make it first")
    if bench.baseline is not None and (in_processes(config) or bench.against or bench.against_overrides):
        raise ConfigError("bench.baseline compares with a file, bench.against... with what runs now: give one of them")


def _compared_with(sides: Sequence[Side], works: Sequence[Work], config: Config) -> Side | None:
    """Return what the first side is compared with, of a file or measured now; what can't be is a `UsageError`."""
    name = config.bench.baseline
    if name is not None:
        old = read_sides(Path(name).expanduser())[0]
        there = {(measured.shape, measured.batch) for measured in old.measured}
        lacks = [f"it lacks {w.shape} batch {w.batch}" for w in works if (w.shape, w.batch) not in there]
        _refuse_if(name, [*differences(sides[0].facts, old.facts), *lacks])
        return old
    if in_processes(config):  # whose versions of other packages are part of what is compared
        _refuse_if("the other version", differences(sides[0].facts, sides[1].facts, ignore=("versions",)))
    return sides[1] if len(sides) > 1 else None


def _refuse_if(what: str, different: list[str]) -> None:
    if different:
        raise UsageError(f"not comparable with {what}: {'; '.join(different)}: measure both alike")


def _measure(work: Work, sides: Sequence[Side], measuring: Sequence[Measurer], config: Config) -> None:
    with Progress(f"{work.shape} batch {work.batch}"):
        found = take_turns(measuring, work, warmup=config.bench.warmup, repeats=config.bench.repeats)
    for side, measured in zip(sides, found, strict=True):
        side.measured.append(measured)


def _judged(new: Side, old: Side, config: Config) -> Gate:
    """Return what the comparison came to; against another backend nothing fails."""
    bench = config.bench
    stored = bench.baseline is not None
    return judge(
        new,
        old,
        paired=not stored,
        max_regression=bench.max_regression if stored or in_processes(config) else None,
        floor_ms=bench.floor_ms,
        reason=bench.reason,
    )


def _figures(sides: Sequence[Side], gate: Gate | None) -> dict[str, Any]:
    """Return what stats.json says of each side, and what the comparison came to."""
    told = [
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
    return {"sides": told, "gate": _plain(gate)} | _headline(sides[0], told[0]["tests"])


def _headline(side: Side, tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a few figures under the names that other runs have them by, so that sweeps and searches see them.

    Of the first shape that is a prompt, and the first that decodes.
    """
    prefill = next((test for test in tests if test["shape"].startswith("pp") and "+" not in test["shape"]), {})
    decode = next((test for test in tests if "tg" in test["shape"]), {})
    peaks = [test["peak_memory_bytes"] for test in tests if test["peak_memory_bytes"] is not None]
    return {
        "prefill_tok_s": prefill.get("median_tok_s"),
        "ttft_ms": (prefill or decode).get("median_ttft_ms"),
        "tpot_ms": decode.get("median_tpot_ms"),
        "output_tok_s": decode.get("median_tok_s"),
        "peak_memory_bytes": max(peaks, default=None),
        "resident_weight_bytes": side.resources["resident_weight_bytes"],
    }


def _plain(gate: Gate | None) -> dict[str, Any] | None:
    return None if gate is None else asdict(gate) | {"verdict": gate.verdict}


def _save(config: Config, record: RunRecord, sides: Sequence[Side], gate: Gate | None) -> None:
    if record.folder is not None:
        write_sides(record.folder / "bench.json", sides, gate=_plain(gate))
    if (target := config.bench.save_baseline) is not None:
        try:
            write_sides(Path(target).expanduser(), sides[:1])
        except OSError as error:
            raise XinferError(f"bench.save_baseline={target!r}: can't be written ({error.strerror})") from error


def _failures(side: Side) -> list[str]:
    lines = []
    for measured in side.measured:
        figures = summary(measured)
        if count := figures["failed"]:
            every, errors = count + figures["completed"], "; ".join(figures["errors"])
            lines.append(f"{measured.name}: {count} of {every} requests failed, and count for no latency: {errors}")
    return lines


def _show(sides: Sequence[Side], old: Side | None, gate: Gate | None, record: RunRecord) -> None:
    page = console()
    page.print(table(sides), markup=False)
    if gate is not None and old is not None:
        page.print("\n" + "\n".join(comparison_lines(sides[0], old, gate)), markup=False)
    for source in sorted({side.resources["energy_source"] for side in sides}):
        console(stderr=True).print(f"energy  {source}", markup=False)
    if record.folder is not None:
        console(stderr=True).print(f"record  {record.folder}", markup=False)
