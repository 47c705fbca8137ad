"""`python -m xinfer runs [WORD ...]`: recorded runs listed, searched, shown one by one, and compared."""

__all__ = ["run"]

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xinfer.config import Config
from xinfer.errors import UsageError
from xinfer.records.comparison import compare
from xinfer.records.index import RunIndex
from xinfer.records.summary import read_object, summary
from xinfer.tasks import Job
from xinfer.tasks.recording import replay_command
from xinfer.tasks.runs_page import show_comparison, show_list, show_run


def run(config: Config, job: Job) -> int:
    """Print on standard output what the words ask for; folders that can't be read are named on standard error."""
    wanted, root = config.runs, Path(config.runs.folder).expanduser()
    command, words = _command(wanted.words)
    if wanted.limit is not None and wanted.limit < 1:
        raise UsageError(f"runs.limit={wanted.limit} is out of range: a number from 1, or null for all")
    with RunIndex(root) as index:
        for damaged in index.damaged():
            print(f"xinfer: {damaged.folder}: {damaged.problem}", file=sys.stderr)
        if command == "list":
            found = index.search(words, wanted.sort)
            shown = found[: wanted.limit]
            if config.json:
                _print_json([asdict(one) for one in shown])
            else:
                show_list(shown, len(found), root)
            return 0
        folders = [index.find(word) for word in words]
    if command == "show":
        for folder in folders:
            _show(folder, config.json)
    else:
        comparison = compare(folders)
        if config.json:
            _print_json(asdict(comparison))
        else:
            show_comparison(comparison)
    return 0


def _command(words: list[str]) -> tuple[str, list[str]]:
    match words:
        case ["show"]:
            return "show", ["latest"]
        case ["show", *runs]:
            return "show", runs
        case ["compare", _, _, *_]:
            return "compare", words[1:]
        case ["compare", *_]:
            raise UsageError(
                "compare needs two runs or more: runs compare RUN RUN; the first is what others are held to"
            )
    return "list", words


def _show(folder: Path, as_json: bool) -> None:
    one, info = summary(folder), read_object(folder / "run.json")
    command = replay_command(folder, info)
    if as_json:
        facts = {name: info.get(name) for name in ("hashes", "content_hash", "git", "versions", "error")}
        _print_json(asdict(one) | facts | {"replay": command})
    else:
        show_run(one, info, command)


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))
