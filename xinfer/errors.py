"""Everything that xinfer raises on purpose.

    XinferError                     exit code 3: something failed while running
    ├── OverloadedError             too many requests wait already
    ├── EngineStoppedError          the engine was closed, or has failed and can't go on
    ├── UsageError                  exit code 2: what was asked for can't be done as asked
    │   ├── ConfigError             an unknown key, task or choice; a wrong type; a value out of range
    │   ├── RequestError            one request is refused; its neighbours go on
    │   ├── ModelError              a model that is missing, damaged, of an unknown family, or unsafe to load
    │   ├── DeviceError             a device that is not there, or a model that does not fit on it
    │   └── PluginError             a plugin that is missing, broken, or in conflict with another
    └── FetchError                  a model could not be brought here (network, disk, checksum)

A message says what was wrong, with the value, and what to do about it. An internal invariant that does not hold is an
`assert`, never one of these.
"""

__all__ = [
    "ConfigError",
    "DeviceError",
    "EngineStoppedError",
    "FetchError",
    "ModelError",
    "OverloadedError",
    "PluginError",
    "RequestError",
    "UsageError",
    "XinferError",
    "nearest",
]

import difflib
from collections.abc import Iterable


class XinferError(Exception):
    """Base of all errors that xinfer raises on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 3


class UsageError(XinferError):
    """What was asked for can't be done as asked."""

    exit_code = 2


class ConfigError(UsageError):
    """An unknown key, task or choice, a wrong type, a value out of range."""


class RequestError(UsageError):
    """One request is refused; its neighbours go on."""


class ModelError(UsageError):
    """A model that is missing, damaged, of an unknown family, or unsafe to load."""


class DeviceError(UsageError):
    """A device that is not there, or a model that does not fit on it."""


class PluginError(UsageError):
    """A plugin that is missing, broken, or in conflict with another."""


class OverloadedError(XinferError):
    """Too many requests wait already; the same one may be taken later."""


class EngineStoppedError(XinferError):
    """The engine was closed, or has failed and can't go on; what it failed of is the `__cause__`."""


class FetchError(XinferError):
    """A model could not be brought here."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ` (did you mean 'x' or 'y'?)` for the choices that look like `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(c) for c in close)}?)" if close else ""
