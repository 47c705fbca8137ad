"""What `speed.py --save` keeps: written, read, checked, and sittings put together to medians, ratios and memory floors.

No command of its own: `speed.py` writes it and `speed_picture.py` draws it.
"""

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

KINDS = ("prefill_tok_s", "decode_tok_s", "batch_tok_s")
PRECISIONS = {  # of weights, as engines spell them
    "fp32": "fp32|f32|float32",
    "bf16": "bf16|bfloat16",
    "fp16": "fp16|f16|float16",
    "int8": r"int8|q8\w*",
    "int4": r"int4|q4\w*",
}
ENGINES = {  # by the first part of a peer's name
    "hf": "transformers",
    "llama": "llama.cpp",
    "og": "onnxruntime-genai",
    "openvino": "OpenVINO",
    "vllm": "vLLM",
}
COMMAND, FORMAT = "experiments/speed.py", 1
Round = dict[str, dict[str, Any]]


@dataclass
class Sitting:
    """What one call of `speed.py` measured, and on what.

    Attributes:
        command: as it was typed, but of absolute paths the last part.
        started: local time, ISO 8601.
        machine: what `hardware.describe` says of the processor.
        versions: by distribution.
        git: the state of xinfer's own code, if it is a checkout.
        read_bytes_s: at what rate memory is read.
        work, times: the work, as rows, prompt tokens and new tokens, and out of how many a round's figure is the best.
        peers: their precisions by name; every other name is a configuration of xinfer's.
        rounds: figures by name, of finished rounds.
    """

    command: str
    started: str
    machine: dict[str, Any]
    versions: dict[str, str]
    git: dict[str, Any] | None
    read_bytes_s: float
    peers: dict[str, str]
    work: dict[str, list[int]]
    times: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def on(self) -> str:
        """The machine, in words."""
        return f"{self.machine['cpu']}, {self.machine['threads']} threads"


def refuse(text: str) -> NoReturn:
    """End as for wrong usage, with one line."""
    print(text, file=sys.stderr)
    raise SystemExit(2)


def read(path: Path) -> list[Sitting]:
    """Return a file's sittings; one that is damaged or something else is refused."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict) or (found.get("study"), found.get("format")) != (COMMAND, FORMAT):
            refuse(f"{path} is not what `{COMMAND} --save` writes, in format {FORMAT}")
        sittings = [Sitting(**entry) for entry in found["sittings"]]
        for sitting in sittings:
            _check(sitting)
    except OSError as error:
        refuse(f"{path} can't be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        refuse(f"{path} is damaged: {type(error).__name__}: {error}")
    return [sitting for sitting in sittings if sitting.rounds]


def save(path: Path, sittings: list[Sitting]) -> None:
    """Replace a file whole, so that no reader ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"study": COMMAND, "format": FORMAT, "sittings": [asdict(sitting) for sitting in sittings]}
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, path)


def _check(sitting: Sitting) -> None:
    """Raise a `ValueError` or its like where something that figures are made from is missing or no such thing."""
    datetime.fromisoformat(sitting.started)
    rates = [sitting.read_bytes_s, sitting.work["prefill"][1], sitting.work["batch"][0]]
    words = [sitting.command, sitting.on, *sitting.versions.values(), (sitting.git or {"commit": ""})["commit"]]
    for name, found in ((name, found) for each in sitting.rounds for name, found in each.items()):
        rates += [found[kind] for kind in KINDS]
        if name in sitting.peers:
            words.append(sitting.peers[name])
        else:
            words += [found["backend"], found["model"], found["precision"]]
            rates.append(found["step_read_bytes"] or 1)  # 0 says that it has no meaning there
    if not all(isinstance(word, str) for word in words):
        raise TypeError("what should be a text is none")
    if not all(isinstance(rate, int | float) and math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError("what should be a number above zero is none")


def precision(word: str) -> str | None:
    """Return which precision a peer's name ends in (`llama:Q8_0`), or a word stands for."""
    last = word.rpartition(":")[2]
    return next((kind for kind, words in PRECISIONS.items() if re.fullmatch(words, last, re.IGNORECASE)), None)


def without_folders(text: str) -> str:
    """Put PATH for the folders of absolute paths, which mean nothing elsewhere."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+", "PATH/", text)


def median(rounds: Sequence[Round], name: str, kind: str) -> float:
    """Return the median over all rounds that have a name."""
    return float(statistics.median(found[name][kind] for found in rounds if name in found))


def ratio(rounds: Sequence[Round], name: str, other: str, kind: str) -> float | None:
    """Return the median of the rounds' own ratios, of those that have both names; None where there is none."""
    both = [found for found in rounds if name in found and other in found]
    return statistics.median(found[name][kind] / found[other][kind] for found in both) if both else None


@dataclass(frozen=True)
class Row:
    """One engine in one precision.

    Attributes:
        name: in the rounds.
        label: for people.
        precision: of its weights.
        backend: of xinfer's; None for other engines.
        floor: tokens a second that reading the weights allows; None where nobody knows what a step reads.
    """

    name: str
    label: str
    precision: str
    backend: str | None
    floor: float | None


@dataclass(frozen=True)
class Study:
    """Sittings of one model put together; the row that decodes fastest comes first."""

    model: str
    sittings: list[Sitting]
    rounds: list[Round]
    read_bytes_s: float
    rows: list[Row]

    def groups(self) -> dict[str, list[Row]]:
        """Return the rows by precision, the widest first."""
        there = {row.precision for row in self.rows}
        order = [*PRECISIONS, *sorted(there - PRECISIONS.keys())]
        return {kind: [row for row in self.rows if row.precision == kind] for kind in order if kind in there}

    def rates(self, row: Row, kind: str) -> list[float]:
        """Return a row's figures, round after round."""
        return [found[row.name][kind] for found in self.rounds if row.name in found]

    def share(self, row: Row) -> str:
        """Return what part of its floor a row reaches."""
        return f"{median(self.rounds, row.name, 'decode_tok_s') / row.floor:.0%}" if row.floor else ""


def put_together(sittings: Iterable[Sitting]) -> Study:
    """Return one study of several sittings, each counted once however many files have it."""
    fullest: dict[tuple[str, str], Sitting] = {}
    for sitting in sorted(sittings, key=lambda sitting: (sitting.started, len(sitting.rounds))):
        fullest[sitting.started, sitting.command] = sitting
    kept = list(fullest.values())
    rounds = [found for sitting in kept for found in sitting.rounds]
    last = {name: found for each in rounds for name, found in each.items()}
    peers = {name: kind for sitting in kept for name, kind in sitting.peers.items() if name in last}
    ours = {name: found for name, found in last.items() if name not in peers}
    models = {found["model"] for found in ours.values()}
    _check_together(kept, models)
    read_bytes_s = max(sitting.read_bytes_s for sitting in kept)
    rows = [
        Row(
            name,
            label(name, found["backend"], found["precision"]),
            found["precision"],
            found["backend"],
            read_bytes_s / found["step_read_bytes"] if found["step_read_bytes"] else None,
        )
        for name, found in ours.items()
    ]
    for name, kind in peers.items():
        floors = [row.floor for row in rows if row.backend and row.precision == kind and row.floor]
        rows.append(Row(name, peer_label(name), kind, None, max(floors, default=None)))
    rows.sort(key=lambda row: -median(rounds, row.name, "decode_tok_s"))
    return Study(" ".join(models), kept, rounds, read_bytes_s, rows)


def _check_together(sittings: Sequence[Sitting], models: set[str]) -> None:
    if not sittings:
        refuse("there is no finished round in these files")
    for what, different in (("machines", {sitting.on for sitting in sittings}), ("models", models)):
        if len(different) > 1:
            named = " and ".join(sorted(different))
            refuse(f"these figures are of different {what}, which one picture can't compare: {named}")
    if any((sitting.work, sitting.times) != (sittings[0].work, sittings[0].times) for sitting in sittings):
        refuse("these figures are of different work, which one picture can't compare")


def label(name: str, backend: str, precision: str) -> str:
    """Return the backend, and of a line of overrides what neither it nor the precision says."""
    said = ("backend=", "model=", "model.reference=", f"model.quantization={precision}")
    rest = [word for word in name.split() if not word.startswith(said)]
    if precision in ("fp32", "bf16", "fp16"):
        rest = [word for word in rest if not word.startswith("model.dtype=")]
    return ", ".join([f"xinfer {backend}", *(re.sub(r"^\+*\w+\.(quantization_)?", "", word) for word in rest)])


def peer_label(name: str) -> str:
    engine, _, word = name.partition(":")
    return f"{ENGINES.get(engine, engine)} {word}".strip()
