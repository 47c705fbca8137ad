"""What a chat template may take of the machine: a time, and a size of any value that it makes.

Whatever makes a value larger than what goes into it is measured first, and so is every list: a few lists that hold each
other twice are small, and endless to print or to compare.
"""

__all__ = [
    "LARGEST",
    "SECONDS",
    "check_bits",
    "check_grown",
    "check_size",
    "check_widths",
    "clock",
    "concat",
    "guarded",
    "kept",
    "listed",
    "size",
    "tick",
]

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from math import inf
from time import perf_counter, thread_time
from typing import Any

from xinfer.errors import RequestError

SECONDS = 2.0  # of the thread's own time, so that a busy machine refuses nothing; templates in use take milliseconds
LARGEST = 1 << 24  # characters of a value; a context of a million tokens has some four million
_ELEMENT = 16  # characters that an element of a list counts as, beside its own
_LONGEST_NUMBER = 1 << 14  # bits
_WIDEST = 100_000  # characters to which a format pads

# Methods and filters whose result can be longer than all that they are given.
_PADDING = frozenset({"batch", "center", "ljust", "rjust", "slice", "zfill"})
_GROWING = _PADDING | {"expandtabs", "format", "indent", "join", "replace", "translate"}
_GROWS_AT = {"expandtabs": "\t", "format": "%", "indent": "\n"}
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")
_CONTAINERS = (list, tuple, dict)

_deadline: ContextVar[tuple[float, float]] = ContextVar("deadline", default=(inf, inf))  # by the clock, of the thread


@contextmanager
def clock() -> Iterator[None]:
    """Have the time limit begin for what is done inside, on this thread."""
    token = _deadline.set((perf_counter() + SECONDS, thread_time() + SECONDS))
    try:
        yield
    finally:
        _deadline.reset(token)


def tick() -> None:
    """Refuse to go on after the time limit."""
    by_clock, own = _deadline.get()
    if perf_counter() > by_clock and thread_time() > own:  # the second is slower to read, and never ahead of the first
        raise RequestError(
            f"the chat template takes longer than its time limit of {SECONDS:g} s for these messages: "
            "give fewer of them, or take a checkpoint with another template"
        )


def check_size(size: int) -> None:
    """Refuse a value of this size, in characters, where it is too large."""
    if size > LARGEST:
        raise RequestError(
            f"the chat template makes a value larger than its size limit of {LARGEST} characters of these messages: "
            "shorten them, or take a checkpoint with another template"
        )


def check_bits(bits: int) -> None:
    """Refuse a number of this many bits where it is too large."""
    if bits > _LONGEST_NUMBER:
        raise RequestError(f"the chat template makes a number above its size limit of {_LONGEST_NUMBER} bits")


def check_widths(widths: Iterable[str | int]) -> None:
    """Refuse to pad to one of these widths, in characters, where it is too large or stands elsewhere (`*`)."""
    for width in widths:
        if width == "*" or int(width or 0) > _WIDEST:
            raise RequestError(f"the chat template pads to {width!s:.20} characters, its size limit is {_WIDEST}")


def size(*values: Any) -> int:
    """Return how many characters are in values, an element of a list counted as some; above `LARGEST` any number."""
    total, left = 0, list(values)
    while left and total <= LARGEST:
        value = left.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, _CONTAINERS):
            total += _ELEMENT * len(value)
            left += value
            if isinstance(value, dict):
                left += value.values()
    return total


def kept(value: Any) -> Any:
    """Return a value that was made, unless it is too large."""
    if isinstance(value, _CONTAINERS):
        check_size(size(value))
    elif isinstance(value, int):
        check_bits(value.bit_length())
    return value


def _metered(values: Iterable[Any]) -> Iterator[Any]:
    total = 0
    for value in values:
        check_size(total := total + _ELEMENT + size(value))
        yield value


def listed(value: Any) -> Any:
    """Return what an iterator gives as a list, anything else as it is."""
    return list(_metered(value)) if isinstance(value, Iterator) else value


def concat(pieces: Iterable[Any]) -> str:
    """Return the texts of these pieces as one."""
    texts, total = [], 0
    for text in map(str, pieces):
        check_size(total := total + len(text))
        texts.append(text)
    return "".join(texts)


def check_grown(name: str, value: Any, others: Sequence[Any]) -> None:
    """Refuse what the method or filter `name` makes of `value`, with `others`, where that is too large."""
    if name not in _GROWING:
        return
    each = max((abs(other) if isinstance(other, int) else size(other) for other in others), default=8)
    if name in _PADDING:
        times = 1
    elif name == "join":
        times = len(value) if isinstance(value, Sized) else 1
    elif name == "translate":
        times = len(value)
    else:
        times = str(value).count(str(others[0]) if name == "replace" else _GROWS_AT[name]) + 1
    if name == "format":
        check_widths(width for widths in _PERCENT.findall(str(value)) for width in widths)
    check_size(size(value) + each * times)


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that looks at the clock, and measures what goes in and what comes out."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        tick()
        if name == "join":
            args = (*args[:first], listed(args[first]), *args[first + 1 :])
        named = [kwargs[key] for key in sorted(kwargs, reverse=True)]  # `old` before `new`
        check_grown(name, args[first], [*args[first + 1 :], *named])
        made = function(*args, **kwargs)
        return _metered(made) if isinstance(made, Iterator) else kept(made)

    return inner
