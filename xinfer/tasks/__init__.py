"""What `python -m xinfer TASK` can do: one file a task, found by its name, each with `run(config, job) -> int`."""

__all__ = ["Job"]

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.inputs import Prompt
from xinfer.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Job:
    """What a task gets besides its configuration.

    Attributes:
        plugins: those loaded.
        prompts: texts from the command line; empty where none was given.
        folder: the run's folder, which may not be there yet.
        overrides: what was changed on the command line, as Hydra overrides.
        resolved: the whole configuration as plain data, to be recorded.
        hydra: Hydra's own configuration, likewise.
    """

    plugins: Plugins
    prompts: tuple[Prompt, ...]
    folder: Path
    overrides: tuple[str, ...]
    resolved: dict[str, Any]
    hydra: dict[str, Any]
