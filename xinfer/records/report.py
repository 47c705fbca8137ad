"""report.html: a run on one page that needs nothing else, for people who would rather look than read JSON."""

__all__ = ["write_report"]

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.engine.stats import percentile
from xinfer.records.page import ceiling, number, write_page
from xinfer.records.reader import RecordedRun, read_run

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 48, 26
_MOST_POINTS = 1500  # of one curve; longer ones are thinned, keeping each stretch's largest


@dataclass(frozen=True, slots=True)
class Curve:
    """One request's times between tokens, in the picture's coordinates."""

    label: str
    points: str
    hue: int


@dataclass(frozen=True, slots=True)
class Picture:
    """The curves with their axes: marks are (place in the picture, text)."""

    curves: list[Curve]
    x_marks: list[tuple[float, str]]
    y_marks: list[tuple[float, str]]
    median: tuple[float, str] | None
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    bottom: int = _BOTTOM


def write_report(folder: Path) -> Path:
    """Write a run folder's report.html from the other files in it, and return its path."""
    run = read_run(folder)
    return write_page(
        folder / "report.html",
        "report.html.j2",
        run=run,
        info=run.info,
        stats=run.stats,
        picture=latency_picture(run),
        facts=_facts(run),
        stages=_stages(run),
    )


def latency_picture(run: RecordedRun) -> Picture | None:
    """Return each request's time from token to token, over the tokens; None where nothing was generated."""
    gaps = {index: output["stats"]["itl_ms"] for index, output in sorted(run.outputs.items())}
    gaps = {index: values for index, values in gaps.items() if values}
    if not gaps:
        return None
    everything = [gap for values in gaps.values() for gap in values]
    median, high = percentile(everything, 50) or 0.0, max(everything)
    top = ceiling(min(high, 4 * (percentile(everything, 99) or high)))
    longest = max(len(values) for values in gaps.values())

    def x(token: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * token / max(longest, 1), 1)

    def y(milliseconds: float) -> float:
        return round((_HEIGHT - _BOTTOM) * (1 - min(milliseconds, top) / top), 1)

    curves = [
        Curve(f"request {index}", " ".join(f"{x(t)},{y(g)}" for t, g in _thinned(values)), 210 + 47 * i)
        for i, (index, values) in enumerate(gaps.items())
    ]
    return Picture(
        curves=curves,
        x_marks=[(x(t), str(t + 1)) for t in _marks(longest)],
        y_marks=[(y(top * i / 4), number(top * i / 4)) for i in range(5)],
        median=(y(median), f"median {median:.1f} ms"),
    )


def _thinned(values: list[float]) -> list[tuple[int, float]]:
    step = -(-len(values) // _MOST_POINTS)
    return [
        max(((i, v) for i, v in enumerate(values[s : s + step], s)), key=lambda p: p[1])
        for s in range(0, len(values), step)
    ]


def _marks(count: int) -> list[int]:
    step = max(1, round(ceiling(count / 8)))
    return list(range(0, count, step))


def _stages(run: RecordedRun) -> list[dict[str, Any]]:
    """Return by stage how many steps there were and where their time went, in milliseconds."""
    parts = ("schedule_ms", "forward_ms", "sample_ms", "output_ms")
    rows = []
    for stage in ("prefill", "mixed", "decode"):
        steps = [step for step in run.steps if step["stage"] == stage]
        if steps:
            total = sum(step["step_ms"] for step in steps)
            shares = {part.removesuffix("_ms"): sum(step[part] for step in steps) / (total or 1) for part in parts}
            batch = sum(step["batch_size"] for step in steps) / len(steps)
            rows.append({"stage": stage, "steps": len(steps), "batch": batch, "total_ms": total, "shares": shares})
    return rows


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    """Return what the page says of model, machine and code, in order."""
    info, runner = run.info, run.info.get("runner") or {}
    model, hardware, git = info.get("model") or {}, info.get("hardware") or {}, info.get("git")
    versions = info.get("versions") or {}
    facts = [
        ("model", model.get("reference")),
        ("family", f"{model['family']}, {model['parameters'] / 1e6:,.1f} M parameters" if model else None),
        ("backend", (info.get("config") or {}).get("backend", {}).get("name")),
        ("device", f"{runner['device']}, {runner['dtype']}" if runner else None),
        ("processor", f"{hardware.get('cpu')}, {hardware.get('logical_cores')} cores" if hardware else None),
        ("seed", info.get("seed")),
        ("greedy", info.get("greedy")),
        ("commit", f"{git['commit'][:12]}{', changed' if git['dirty'] else ''}" if git else None),
        ("content hash", info.get("content_hash")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or None),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]
