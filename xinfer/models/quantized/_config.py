"""Reading a quantization config: a field that is missing or odd is an error that names it."""

__all__ = ["Config", "block_size", "flag", "group_size", "integer", "matches", "text"]

import functools
import re
from collections.abc import Mapping
from typing import Any

from xinfer.errors import ModelError

Config = Mapping[str, Any]

_MAX_PATTERN, _MAX_REPEATS, _MAX_NAME = 1000, 6, 256


def integer(config: Config, name: str, allowed: tuple[int, ...] = (), least: int = 1) -> int:
    """Return a field that must be one of some whole numbers, or, where none are given, one from `least` on."""
    value = config.get(name)
    if type(value) is not int or (value not in allowed if allowed else value < least):
        wanted = f"one of {', '.join(map(str, allowed))}" if allowed else f"a whole number of at least {least}"
        raise ModelError(f"quantization_config: {name}={value!r}, but {wanted} is expected")
    return value


def group_size(config: Config) -> int:
    """Return how many consecutive inputs share a scale: at least 1, or -1 for all of them."""
    size = integer(config, "group_size", least=-1)
    if size == 0:
        raise ModelError("quantization_config: group_size=0, but -1 (one group) or at least 1 is expected")
    return size


def block_size(config: Config, name: str) -> tuple[int, int]:
    """Return how many rows and columns share a scale."""
    size = config.get(name)
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise ModelError(f"quantization_config: {name}={size!r}, but two whole numbers above 0 are expected")
    return size[0], size[1]


def flag(config: Config, name: str, default: bool = False) -> bool:
    """Return a field that must be true or false; a missing or null one takes the default."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"quantization_config: {name}={value!r}, but true or false is expected")
    return default if value is None else value


def text(config: Config, name: str, supported: tuple[str, ...], default: str | None = None) -> str:
    """Return a field that must be one of some words, written in any case; a missing or null one takes the default."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, str) or value.lower() not in supported:
        raise ModelError(f"quantization_config: {name}={value!r} is not supported (supported: {', '.join(supported)})")
    return value.lower()


def matches(pattern: str, name: str) -> bool:
    """Whether a config's regular expression matches the start of a module's name, as `re.match` does.

    The pattern is somebody else's: one that repeats a group, or has many repetitions, could take forever.
    """
    return len(name) <= _MAX_NAME and _compiled(pattern).match(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    bare = re.sub(r"\\.", "_", pattern)  # what is escaped repeats nothing
    if len(pattern) > _MAX_PATTERN or re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > _MAX_REPEATS:
        raise ModelError(f"quantization_config: the pattern {pattern[:80]!r} repeats too much: write it more simply")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"quantization_config: {pattern!r} is no regular expression ({error}): correct it") from error
