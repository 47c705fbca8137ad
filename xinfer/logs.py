"""Events on standard error and in a run's log: a line each, for people or as JSON. No prompt or answer is in one."""

__all__ = ["configure", "log_to_file"]

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from xinfer.errors import ConfigError, nearest

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_root = logging.getLogger("xinfer")


def configure(level: str = "auto", as_json: bool = False) -> None:
    """Send xinfer's events to standard error; `XINFER_LOG` goes before `level`.

    `auto` says warnings on a terminal, where tables and progress are shown, and events elsewhere.
    """
    level = os.environ.get("XINFER_LOG") or level
    if level == "auto":
        level = "warning" if sys.stderr.isatty() else "info"
    if level not in _LEVELS:
        raise ConfigError(f"log level {level!r} is unknown{nearest(level, _LEVELS)} (there are: {', '.join(_LEVELS)})")
    handler = logging.StreamHandler()
    handler.setLevel(_LEVELS[level])
    handler.setFormatter(_Json() if as_json else _Line())
    for old in list(_root.handlers):
        _root.removeHandler(old)
        old.close()
    _root.addHandler(handler)
    _root.setLevel(min(_LEVELS[level], _LEVELS["info"]))
    _root.propagate = False


def log_to_file(path: Path) -> logging.Handler:
    """Write events (of `info` and above) to a file too; close the handler when the run ends."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Line())
    _root.addHandler(handler)
    return handler


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _Line(logging.Formatter):
    """`12:30:59 info  model loaded  seconds=1.25 family=llama`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={_plain(value)}" for name, value in _fields(record).items())
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()}" + (f"  {fields}" if fields else "")
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Json(logging.Formatter):
    """One object a line; numbers stay numbers."""

    def format(self, record: logging.LogRecord) -> str:
        event = {"time": record.created, "level": record.levelname.lower(), "event": record.getMessage()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event | _fields(record), default=str)


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
