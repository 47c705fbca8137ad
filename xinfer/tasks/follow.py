"""What all but the first of several processes do: they compute with it, and neither speak nor record."""

__all__ = ["run"]

from xinfer.config import Config
from xinfer.records.reader import read_run
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.recorded import configuration_of, find_run


def run(config: Config, job: Job) -> int:
    """Follow the first process, if its task computes; return the exit code, unless the program ends with its runner."""
    if config.task == "replay":
        config, _ = configuration_of(read_run(find_run(config.run)), job.overrides, job.plugins)
    if config.task in ("bench", "generate", "replay"):
        session = Session(config, job.plugins)
        session.check()
        _ = session.runner
    return 0
