"""Other configurations in the same process: what was asked for, with some things changed."""

__all__ = ["varied"]

from collections.abc import Sequence

from xinfer.composing import compose
from xinfer.config import Config
from xinfer.tasks import Job


def varied(job: Job, changes: Sequence[str]) -> Config:
    """Return the configuration of this command line with these Hydra overrides (`key=value`) over it.

    What is unknown or out of range is a `UsageError`, as on the command line.
    """
    return compose([*job.overrides, *changes], job.plugins)
