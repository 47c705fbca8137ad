"""Tables of recorded runs for the terminal."""

__all__ = ["show_comparison", "show_list", "show_run"]

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from rich.markup import escape

from xinfer.hardware import gibibytes
from xinfer.records.comparison import Comparison
from xinfer.records.page import number
from xinfer.records.summary import RunSummary
from xinfer.tasks.console import console

_WIDEST = 1000  # columns where no terminal cuts lines
_LONGEST = 60  # characters of a value in a table of differences
_DETAILS = "percentiles."  # too many for a table; --json has them


def show_list(runs: Sequence[RunSummary], found: int, root: Path) -> None:
    """Print a line for each run, whole where no terminal limits it, and how many there are besides."""
    page = console(width=_WIDEST)
    if not runs:
        page.print(f"no run under {root}/ is like that" if root.is_dir() else f"there is no {root}/ yet", markup=False)
        return
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for name in ("run", "started", "status", "task", "model", "backend"):
        table.add_column(name, overflow="fold", no_wrap=name == "started")
    for name in ("requests", "tokens", "tokens/s", "in all", "seed"):
        table.add_column(name, justify="right")
    for one in runs:
        figures = [one.figures.get(name) for name in ("requests", "generated_tokens", "tok_s", "output_tok_s")]
        row = [one.folder, _local(one.started), one.status, one.task, one.model_name, one.computes]
        table.add_row(*(escape(text or "-") for text in (*row, *map(number, figures), one.seed)))
    page.print(table, soft_wrap=False)
    if found > len(runs):
        page.print(f"{len(runs)} of {found}; runs.limit=null lists all", markup=False)


def show_run(one: RunSummary, info: Mapping[str, Any], command: str | None) -> None:
    """Print what one run was, its figures, what was changed for it, its hashes, and how to run it again."""
    page = console()
    git, error = info.get("git") or {}, info.get("error")
    facts = [
        ("run", one.folder),
        ("status", one.status + (f": {error}" if error else "")),
        ("started", _local(one.started)),
        ("task", one.task),
        ("model", one.model),
        ("backend", f"{one.computes}, on {one.device or '-'}"),
        ("seed", one.seed),
        ("overrides", " ".join(one.overrides)),
        ("processor", (info.get("hardware") or {}).get("cpu")),
        ("commit", f"{git.get('commit')}{', changed' if git.get('dirty') else ''}" if git else None),
        *((f"{name} hash", value) for name, value in (info.get("hashes") or {}).items()),
        ("content hash", info.get("content_hash")),
    ]
    page.print(_pairs((name, str(value)) for name, value in facts if value), soft_wrap=False)
    figures = [(name, value) for name, value in one.figures.items() if not name.startswith(_DETAILS)]
    page.print(_pairs(((name, _figure(name, value)) for name, value in figures), right=True))
    if one.problem:
        page.print(one.problem, markup=False)
    page.print(f"replay  {command}" if command else "the record does not tell how to replay it", markup=False)


def show_comparison(comparison: Comparison) -> None:
    """Print runs side by side: figures with their ratios to the first run's, then what else differs."""
    page = console()
    for place, one in enumerate(comparison.runs, 1):
        page.print(f"[bold]{place}[/bold]  {escape(one.folder)}  {escape(one.model_name)}  {escape(one.computes)}")
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    table.add_column("", style="dim")
    for place in range(1, len(comparison.runs) + 1):
        table.add_column(str(place), justify="right")
        if place > 1:
            table.add_column(f"{place} / 1", justify="right", style="dim")
    for figure in comparison.figures:
        if figure.name.startswith(_DETAILS):
            continue
        cells = [_figure(figure.name, figure.values[0])]
        for value, ratio in zip(figure.values[1:], figure.ratios[1:], strict=True):
            cells += [_figure(figure.name, value), "-" if ratio is None else f"{ratio:.3f}"]
        table.add_row(escape(figure.name), *cells)
    page.print(table)
    for kind, rows in comparison.differences.items():
        page.print(f"different [bold]{kind}[/bold]")
        page.print(_differences(rows), soft_wrap=False)
    if not comparison.differences:
        page.print("nothing differs: configuration, versions, hardware, hashes and code are the same")


def _differences(rows: Mapping[str, Sequence[Any]]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    for name, values in rows.items():
        table.add_row(escape(name), *(escape(_short(str(value))) for value in values))
    return table


def _pairs(rows: Iterable[tuple[str, str]], right: bool = False) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", justify="right" if right else "left")
    for name, text in rows:
        table.add_row(escape(name), escape(text))
    return table


def _figure(name: str, value: float | None) -> str:
    if name.endswith("_bytes") and value is not None:
        return gibibytes(int(value))
    return number(value)


def _local(started: str | None) -> str:
    """Return a time on the local clock, to the second."""
    return "-" if started is None else f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M:%S}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
