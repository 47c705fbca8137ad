"""Recorded runs side by side: their figures as ratios to the first one's, and what else differs."""

__all__ = ["Comparison", "Figure", "compare"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.records.summary import RunSummary, flat, read_object, summary


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of each run, and its ratio to the first run's; None where there is none, or nothing to divide by."""

    name: str
    values: tuple[float | None, ...]
    ratios: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs.

    Attributes:
        figures: all that any of them has, by name.
        differences: by kind (run, configuration, versions, hardware, hashes, code) the dotted names of what is not the
            same in all, with each run's value, None where it has none.
    """

    runs: tuple[RunSummary, ...]
    figures: tuple[Figure, ...]
    differences: Mapping[str, Mapping[str, tuple[Any, ...]]]


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare runs with the first one; a folder without a readable run.json is a `UsageError`."""
    infos = [read_object(folder / "run.json") for folder in folders]
    runs = tuple(summary(folder) for folder in folders)
    names = sorted({name for run in runs for name in run.figures})
    kinds: dict[str, list[Any]] = {
        "run": [{name: info.get(name) for name in ("task", "status", "seed")} for info in infos],
        "configuration": [info.get("config") for info in infos],
        "versions": [info.get("versions") for info in infos],
        "hardware": [info.get("hardware") for info in infos],
        "hashes": [_hashes(info) for info in infos],
        "code": [info.get("git") for info in infos],
    }
    found = {kind: _differences(trees) for kind, trees in kinds.items()}
    return Comparison(
        runs,
        tuple(_figure(name, [run.figures.get(name) for run in runs]) for name in names),
        {kind: differences for kind, differences in found.items() if differences},
    )


def _hashes(info: Mapping[str, Any]) -> dict[str, Any]:
    hashes = info.get("hashes")
    return {**(hashes if isinstance(hashes, dict) else {}), "all of them": info.get("content_hash")}


def _figure(name: str, values: Sequence[float | None]) -> Figure:
    first = values[0]
    ratios = (value / first if value is not None and first else None for value in values)
    return Figure(name, tuple(values), tuple(ratios))


def _differences(trees: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    leaves = [dict(flat(tree)) if isinstance(tree, dict) else {} for tree in trees]
    names = sorted({name for leaf in leaves for name in leaf})
    rows = {name: tuple(leaf.get(name) for leaf in leaves) for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}
