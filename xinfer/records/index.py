"""An index over the folders of runs, so that many can be searched: a cache, made of the folders and of nothing else."""

__all__ = ["RunIndex"]

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Self

from xinfer.errors import UsageError, nearest
from xinfer.records.query import BY_TEXT, conditions, figure_path
from xinfer.records.summary import RunSummary, is_run, summary

_SCHEMA = 1
_WAIT_S = 10  # for others who write the index; after that this process does without its file
_COLUMNS = tuple(field.name for field in fields(RunSummary))
# Figures that are columns too, for whoever opens the index with another program.
_FIGURES = (
    *("requests", "prompt_tokens", "generated_tokens", "ttft_ms", "tpot_ms", "tok_s", "output_tok_s"),
    *("resident_weight_bytes", "kv_cache_bytes", "peak_memory_bytes"),
)


class RunIndex:
    """The runs under a folder, as they are now; to be closed, or used as a context.

    Its file is `.index.sqlite` in that folder, so that it goes wherever the runs go. A run is read again when its
    run.json or stats.json have another size or time. Several processes may use the file at once. One that is damaged
    or of another version is made anew; where none can be written, the index is in memory.

    Args:
        root: the folder; where it is not there, there are no runs.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        path = root / ".index.sqlite"
        if not root.is_dir():
            self._open(":memory:")
            return
        try:
            self._open(path)
        except sqlite3.OperationalError:  # a folder that can't be written, or others who write for long
            self._open(":memory:")
        except sqlite3.DatabaseError:
            with suppress(OSError):
                path.unlink()
            try:
                self._open(path)
            except sqlite3.DatabaseError:
                self._open(":memory:")

    def _open(self, path: Path | str) -> None:
        connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
        try:
            _prepare(connection)
            _refresh(connection, self._root)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def search(self, words: Sequence[str] = (), sort: str = "-started", limit: int | None = None) -> list[RunSummary]:
        """Return the runs that all words hold for (see `conditions`), at most `limit`.

        `sort` names a field or a figure; with a minus the largest or latest comes first. Runs without it come last.
        What can't be understood is a `UsageError`.
        """
        figures = self._figure_names()
        held = conditions([word.replace(f"{self._root.as_posix()}/", "") for word in words], figures)
        order, parameters = _order(sort, figures)
        where = " AND ".join([f"({condition.sql})" for condition in held] or ["1"])
        bound = [value for condition in held for value in condition.parameters]
        rows = self._connection.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE status != 'damaged' AND {where} ORDER BY {order} LIMIT ?",  # noqa: S608  # only our own words
            (*bound, *parameters, -1 if limit is None else limit),
        )
        return [self._run(row) for row in rows]

    def find(self, name: str, fits: Callable[[Path], bool] = lambda folder: True) -> Path:
        """Return the folder that is meant: itself, a part of it that only one run has, or `latest`, of those that fit.

        What is no run's, or several runs', is a `UsageError`.
        """
        if Path(name).expanduser().joinpath("run.json").is_file():
            return Path(name).expanduser()
        if name == "latest":
            newest = next((Path(one.folder) for one in self.search() if fits(Path(one.folder))), None)
            if newest is None:
                raise UsageError(f"there is no such run under {self._root}/ yet: name a run's folder")
            return newest
        found = self.search([f"folder={name}"])
        exact = [one for one in found if one.folder.endswith(f"/{name.strip('/')}")]
        if len(exact or found) == 1:
            return Path((exact or found)[0].folder)
        if not found:
            raise UsageError(f"{name} is no run's folder, and part of none: `python -m xinfer runs` lists them")
        several = ", ".join(one.folder for one in found[:5]) + (", ..." if len(found) > 5 else "")
        raise UsageError(f"{name} is part of {len(found)} runs' folders ({several}): name more of it")

    def damaged(self) -> list[RunSummary]:
        """Return the folders of which something can't be read."""
        rows = self._connection.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE problem IS NOT NULL ORDER BY folder"  # noqa: S608
        )
        return [self._run(row) for row in rows]

    def _run(self, row: Sequence[str]) -> RunSummary:
        values = dict(zip(_COLUMNS, row, strict=True))
        values["folder"] = (self._root / values["folder"]).as_posix()
        given = {name: json.loads(values.pop(name)) for name in ("overrides", "figures")}
        return RunSummary(**values, overrides=tuple(given["overrides"]), figures=given["figures"])

    def _figure_names(self) -> set[str]:
        rows = self._connection.execute("SELECT DISTINCT key FROM runs, json_each(figures)")
        return {*_FIGURES, *(name for (name,) in rows)}

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table, instead of one of another version."""
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _SCHEMA:
        copies = [f"{name} REAL AS (json_extract(figures, '{figure_path(name)}')) VIRTUAL" for name in _FIGURES]
        own = [f"{name} TEXT{' PRIMARY KEY' * (name == 'folder')}" for name in (*_COLUMNS, "words", "signature")]
        connection.execute("DROP TABLE IF EXISTS runs")
        connection.execute(f"CREATE TABLE runs ({', '.join([*own, *copies])})")
        connection.execute(f"PRAGMA user_version = {_SCHEMA}")
    connection.execute("COMMIT")


def _refresh(connection: sqlite3.Connection, root: Path) -> None:
    """Bring the table up to date with the folders.

    Only what was known before the folders were looked at is taken out again, so that a run which another process has
    found in the meantime stays.
    """
    known = dict(connection.execute("SELECT folder, signature FROM runs").fetchall())
    there = dict(_folders(root))
    changed = [
        _row(name, summary(root / name), signature) for name, signature in there.items() if known.get(name) != signature
    ]
    gone = [(name,) for name in known if name not in there]
    if changed or gone:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("DELETE FROM runs WHERE folder = ?", gone)
        names, places = ", ".join((*_COLUMNS, "words", "signature")), ", ".join("?" * (len(_COLUMNS) + 2))
        connection.executemany(f"INSERT OR REPLACE INTO runs ({names}) VALUES ({places})", changed)  # noqa: S608
        connection.execute("COMMIT")


def _folders(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each run's folder, as seen from the root, with what tells whether it has changed.

    Links are not followed, nor hidden folders, nor names that are no text.
    """
    for folder, inside, files in os.walk(root):
        inside[:] = [] if is_run(files) else [name for name in inside if not name.startswith(".")]
        path = Path(folder)
        name = path.relative_to(root).as_posix()
        if is_run(files) and name.isprintable():
            yield name, " ".join(map(_signature, (path / "run.json", path / "stats.json")))


def _signature(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_mtime_ns}/{found.st_size}"


def _row(name: str, run: RunSummary, signature: str) -> tuple[str | None, ...]:
    lists = {column: json.dumps(getattr(run, column)) for column in ("overrides", "figures")}
    values = asdict(run) | lists | {"folder": name}
    words = (name, run.task, run.status, run.model, run.computes, run.device, *run.overrides)
    return (*values.values(), "\n".join(filter(None, words)).casefold(), signature)


def _order(sort: str, figures: set[str]) -> tuple[str, list[str]]:
    """Return the SQL for an order, and its parameters."""
    name, down = sort.removeprefix("-"), "DESC" if sort.startswith("-") else "ASC"
    if name in (*BY_TEXT, "started"):
        return f"{name} IS NULL, {name} {down}, folder {down}", []
    if name in figures:
        path = figure_path(name)
        return f"json_extract(figures, ?) IS NULL, json_extract(figures, ?) {down}, folder {down}", [path, path]
    choices = ("started", *BY_TEXT, *sorted(figures))
    raise UsageError(f"runs.sort={sort!r}: runs are not sorted by {name!r}{nearest(name, choices)}")
