"""`python -m xinfer plugins`: which plugins are there and what they bring; a new one; one tested.

python -m xinfer plugins                # lists them, and those that could not be loaded
python -m xinfer plugins new NAME       # writes ./xinfer-NAME, a package with a backend that works
python -m xinfer plugins check [NAME]   # runs the conformance kit on a backend, with the keys that are given
"""

__all__ = ["run"]

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import rich.box
import rich.table

from xinfer.config import Config
from xinfer.errors import ConfigError, nearest
from xinfer.flags import quote
from xinfer.tasks import Job
from xinfer.tasks.console import console
from xinfer.tasks.scaffold import write_plugin

_EXIT_CODES = {0: 0, 1: 1, 2: 130, 4: 2}  # pytest's to ours; whatever else there is has failed


def run(config: Config, job: Job) -> int:
    """Do what `plugins.action` says."""
    actions = {None: _list, "new": _new, "check": _check}
    action = config.plugins.action
    if action not in actions:
        known = [name for name in actions if name]
        raise ConfigError(f"plugins.action={action!r} is unknown{nearest(str(action), known)} (there are: new, check)")
    return actions[action](config, job)


def _list(config: Config, job: Job) -> int:
    page = console()
    table = rich.table.Table("plugin", "package", "version", "hooks", box=rich.box.SIMPLE, pad_edge=False)
    for plugin in job.plugins.loaded:
        hooks = ", ".join(name.removeprefix("xinfer_") for name in plugin.hooks)
        table.add_row(plugin.name, plugin.distribution, plugin.version, hooks)
    page.print(table)
    for name, backend in sorted(job.plugins.backends.items()):
        page.print(f"backend  {name}  {backend.summary}", markup=False)
    page.print(f"families  {', '.join(sorted(job.plugins.families))}", markup=False)
    for name, reason in job.plugins.failed.items():
        page.print(f"failed  {name}  {reason}", markup=False)
    return 0


def _new(config: Config, job: Job) -> int:
    taken = {"fake", *job.plugins.backends, *job.plugins.failed, *(plugin.name for plugin in job.plugins.loaded)}
    folder = write_plugin(config.plugins.name, taken, Path.cwd())
    print(f"{folder}\n\npip install -e {folder.name}\npython -m xinfer plugins check {config.plugins.name}")
    return 0


def _check(config: Config, job: Job) -> int:
    """Run the kit as a process of its own, whose verdict is on standard output."""
    name = config.plugins.name or config.backend.name
    if name != "fake":
        job.plugins.backend(name)
    if find_spec("pytest") is None:
        raise ConfigError("plugins check needs pytest: pip install 'xinfer[testing]'")
    keys = [word.removeprefix("backend.") for word in job.overrides if word.startswith("backend.")]
    if keys and name != config.backend.name:
        raise ConfigError(
            f"backend.{keys[0]} is a key of backend={config.backend.name}: give backend={quote(name)} too"
        )
    options = "-p xinfer_pytest -p no:cacheprovider -o addopts= -q -rs --show-capture=stdout --pyargs xinfer.testing"
    command = [sys.executable, "-m", "pytest", *options.split(), "--backend", name]
    command += [f"--backend-key={key}" for key in keys]
    return _EXIT_CODES.get(subprocess.run(command, check=False).returncode, 3)
