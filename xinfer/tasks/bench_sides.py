"""Whom a benchmark measures: one side, or two that take turns, in this process or each in its own."""

__all__ = ["Measurer", "in_processes", "measurers", "take_turns"]

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from xinfer.config import Config
from xinfer.errors import ConfigError
from xinfer.processes import count
from xinfer.records.bench_samples import Measured, Repeat, Side
from xinfer.tasks import Job
from xinfer.tasks.bench_process import BenchProcess, path_of_this
from xinfer.tasks.bench_run import Bench
from xinfer.tasks.bench_work import Work
from xinfer.tasks.variants import varied

# Keys of this process alone, which those that it starts are not told.
_OWN = ("task", "record", "record.enabled", "bench.baseline", "bench.save_baseline", "bench.reason", "bench.follow")
_OTHERS = ("bench.against_python", "bench.against_checkout", "bench.against_overrides")


class Measurer(Protocol):
    """One side: `load` makes it ready, a call runs work once."""

    def load(self) -> Side:
        """Make it ready, and return what is known before anything is measured."""

    def __call__(self, work: Work) -> Repeat:
        """Run work once."""

    def close(self) -> None:
        """Let go of it."""


def in_processes(config: Config) -> bool:
    """Whether two versions are compared, which takes a process for each."""
    return config.bench.against_python is not None or config.bench.against_checkout is not None


def measurers(config: Config, job: Job) -> list[Measurer]:
    """Return the sides, none of them loaded; the first is the one that is asked about."""
    bench = config.bench
    if in_processes(config):
        return _versions(config, job)
    if bench.against is None and not bench.against_overrides:
        return [Bench(config, job.plugins)]
    _one_process("bench.against")
    changes = [] if bench.against is None else [f"backend={bench.against}"]
    other = varied(job, [*changes, *bench.against_overrides])
    return [Bench(config, job.plugins, alone=False), Bench(other, job.plugins, alone=False)]


def _versions(config: Config, job: Job) -> list[Measurer]:
    bench = config.bench
    _one_process("bench.against_python")
    if bench.against is not None:
        raise ConfigError(
            f"bench.against={bench.against!r} compares backends in one process, bench.against_python and "
            "bench.against_checkout versions in two: give one of them"
        )
    checkout = None
    if bench.against_checkout is not None:
        checkout = Path(bench.against_checkout).expanduser().absolute()
        if not (checkout / "xinfer" / "__init__.py").is_file():
            raise ConfigError(f"bench.against_checkout={bench.against_checkout!r} holds no xinfer/: name a checkout")
    kept = [word for word in job.overrides if word.partition("=")[0] not in (*_OWN, *_OTHERS)]
    python = sys.executable if bench.against_python is None else str(Path(bench.against_python).expanduser())
    path = None if checkout is None else str(checkout)
    other = BenchProcess("the other version", python, path, [*kept, *bench.against_overrides])
    return [BenchProcess("this version", sys.executable, path_of_this(), kept), other]


def _one_process(key: str) -> None:
    if count() > 1:
        raise ConfigError(f"{key} does not go with several processes: start it without torchrun")


def take_turns(sides: Sequence[Measurer], work: Work, *, warmup: int, repeats: int) -> list[Measured]:
    """Return each side's repeats of some work, measured in the order A B B A A B ..., after those that only warm up.

    What drifts, such as a clock that falls as a processor gets hot, then hits both alike, whoever went first.
    """
    found = [Measured(work.shape, work.batch, []) for _ in sides]
    for number in range(-warmup, repeats):
        order = list(zip(sides, found, strict=True))
        for side, measured in order if number % 2 == 0 else reversed(order):
            repeat = side(work)
            if number >= 0:
                measured.repeats.append(repeat)
    return found
