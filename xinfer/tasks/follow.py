"""What all but the first of several processes do: they compute with it, and neither speak nor record."""

__all__ = ["run"]

from xinfer.config import Config
from xinfer.session import Session
from xinfer.tasks import Job


def run(config: Config, job: Job) -> int:
    """Follow the first process, if its task computes; return the exit code, unless the program ends with its runner."""
    if config.task in ("bench", "generate"):
        session = Session(config, job.plugins)
        session.check()
        _ = session.runner
    return 0
