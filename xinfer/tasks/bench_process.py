"""A side of a benchmark in a process of its own, which measures when told to and sleeps in between.

One line of JSON each way: the process says what it is, then for each `{"shape": "tg128", "batch": 1}` that it reads it
answers with a `Repeat`. It ends when its standard input does.
"""

__all__ = ["BenchProcess", "follow", "path_of_this"]

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xinfer
from xinfer.errors import XinferError
from xinfer.records.bench_samples import Repeat, Side, repeat_from
from xinfer.tasks.bench_run import Bench
from xinfer.tasks.bench_work import Work

_PROTOCOL = 1
_LONGEST = 64 << 20  # characters of a line
_PATIENCE_S = 30


def follow(bench: Bench) -> int:
    """Be such a process; return the exit code."""
    side = bench.load()
    _tell({"protocol": _PROTOCOL, "side": asdict(side)})
    for line in sys.stdin:
        order = json.loads(line)
        _tell(asdict(bench(Work.parse(order["shape"], order["batch"]))))
    bench.close()
    return 0


def _tell(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class BenchProcess:
    """Starts such a process, and speaks to it.

    Args:
        name: in messages.
        python: the interpreter that runs it.
        path: PYTHONPATH of it; None has none, so that the interpreter's own xinfer is found.
        overrides: of its command line.
    """

    def __init__(self, name: str, python: str, path: str | None, overrides: Sequence[str]) -> None:
        self._name = name
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if path is not None:
            environment["PYTHONPATH"] = path
        # -P: where we stand may be a checkout, whose xinfer would go before the one that is meant.
        command = [python, "-P", "-m", "xinfer", "bench", *overrides, "bench.follow=true", "record.enabled=false"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
            )
        except OSError as error:
            raise XinferError(f"{name}: {python} can't be started ({error})") from error

    def load(self) -> Side:
        """Wait until it is ready, and return what it says of itself."""
        hello = self._read()
        if not isinstance(hello, Mapping) or hello.get("protocol") != _PROTOCOL:
            raise XinferError(f"{self._name} speaks another version of this protocol: compare it by bench.baseline")
        try:
            side = hello["side"]
            return Side(dict(side["facts"]), dict(side["build"]), dict(side["resources"]), [])
        except (KeyError, TypeError, ValueError) as error:
            raise XinferError(f"{self._name} does not say what it is ({error!r})") from error

    def __call__(self, work: Work) -> Repeat:
        """Have it run work once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"shape": work.shape, "batch": work.batch}) + "\n")
            self._process.stdin.flush()
            return repeat_from(self._read())
        except (BrokenPipeError, KeyError, TypeError, ValueError) as error:
            raise XinferError(f"{self._name} does not measure any more ({error!r})") from error

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline(_LONGEST)
        if not line.endswith("\n"):
            code = self._process.wait(_PATIENCE_S) if not line else None
            why = f"ended with exit code {code}; what it said is above" if not line else "says more than fits a line"
            raise XinferError(f"{self._name} {why}")
        try:
            return json.loads(line)
        except ValueError as error:
            raise XinferError(f"{self._name} said {line[:80]!r}, which is no JSON") from error

    def close(self) -> None:
        """Have it end, if need be by force."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def path_of_this() -> str:
    """Return a PYTHONPATH by which another process finds the xinfer that runs here, and what else we were given."""
    here, given = str(Path(xinfer.__file__).parent.parent), os.environ.get("PYTHONPATH")
    return os.pathsep.join([here, given] if given else [here])
