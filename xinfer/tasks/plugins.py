"""`python -m xinfer plugins`: which plugins are there, what they bring, and which could not be loaded."""

__all__ = ["run"]

import rich.box
import rich.table

from xinfer.config import Config
from xinfer.tasks import Job
from xinfer.tasks.console import console


def run(config: Config, job: Job) -> int:
    """Print the page on standard output."""
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
