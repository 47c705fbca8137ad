"""Which runs are meant: words of a search as conditions on the index."""

__all__ = ["BY_TEXT", "Condition", "conditions", "figure_path"]

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from xinfer.errors import UsageError, nearest

# Names that are compared as text: some with all of it, some with a part.
_WHOLE = ("status", "task", "backend", "dtype", "quantization", "device", "seed")
_PART = ("model", "folder")
BY_TEXT = (*_WHOLE, *_PART)
_DATES = {"since": ">=", "before": "<"}
_TERM = re.compile(r"([A-Za-z_][\w.]*)(>=|<=|>|<|=)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition in SQL with its parameters."""

    sql: str
    parameters: tuple[str | float, ...]


def conditions(words: Sequence[str], figures: Iterable[str]) -> list[Condition]:
    """Return the conditions of a search, all of which must hold; a word that can't be understood is a `UsageError`.

    A plain word, and a dotted key with its value, occurs anywhere in folder, task, status, model, backend, precision or
    overrides. `model=` and `folder=` name a part, other fields the whole of what they hold. `since=` and `before=` take
    a date, or date and time, of the local clock. Any of `figures` is compared with a number by >, >=, <, <= or =.
    """
    known = sorted(figures)
    return [_condition(word, known) for word in words]


def figure_path(name: str) -> str:
    """Return where the index's column `figures` holds a figure."""
    return f'$."{name}"'


def _condition(word: str, figures: Sequence[str]) -> Condition:
    match = _TERM.fullmatch(word)
    if match is None:
        return _anywhere(word)
    name, sign, value = match.groups()
    if name in _DATES and sign == "=":
        return Condition(f"started {_DATES[name]} ?", (_moment(word, value),))
    if name in _WHOLE and sign == "=":
        return Condition(f"lower({name}) = ?", (value.lower(),))
    if name in _PART and sign == "=":
        return Condition(f"instr(lower({name}), ?)", (value.lower(),))
    if name in figures:
        return Condition(f"json_extract(figures, ?) {sign} ?", (figure_path(name), _number(word, value)))
    if "." in name and sign == "=":
        return _anywhere(word)
    choices = [*BY_TEXT, *_DATES, *figures]
    raise UsageError(
        f"{word!r}: no run has a figure {name!r}{nearest(name, choices)}; runs are searched by "
        f"{', '.join([*BY_TEXT, *_DATES])}, by figures such as tok_s>50, and by any other word"
    )


def _anywhere(word: str) -> Condition:
    return Condition("instr(words, ?)", (word.casefold(),))


def _moment(word: str, value: str) -> str:
    try:
        return datetime.fromisoformat(value).astimezone(UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):
        raise UsageError(f"{word!r} is no date: write it as 2026-11-30, or 2026-11-30T15:00") from None


def _number(word: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{word!r}: {value!r} is no number") from None
