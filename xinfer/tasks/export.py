"""`python -m xinfer export MODEL OUT`: a model as a folder that other programs run, whole or not at all."""

__all__ = ["run"]

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xinfer.config import Config
from xinfer.errors import ConfigError, UsageError, XinferError
from xinfer.hardware import gibibytes
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.console import console
from xinfer.tasks.export_files import write_files


def run(config: Config, job: Job) -> int:
    """Write the folder, and print on standard output what is in it."""
    if config.export.out is None:
        raise ConfigError("the folder to write is not named: python -m xinfer export MODEL OUT")
    out = Path(os.path.abspath(Path(config.export.out).expanduser()))  # noqa: PTH100, which would follow a link
    session = Session(config, job.plugins)
    export = session.backend.export
    if export is None:
        able = [name for name, backend in sorted(job.plugins.backends.items()) if backend.export is not None]
        raise ConfigError(f"backend={session.backend.name} exports no models (these do: {', '.join(able) or 'none'})")
    _check_is_free(out)
    session.check()
    with _whole(out) as folder:
        notes = write_files(session.model, session.tokenizer, folder)
        export(session.context, folder, config.export.all_logits)
        notes += session.model.notes
    page = console()
    for path in sorted(out.iterdir()):
        size = path.stat().st_size
        page.print(f"{path.name:24} {gibibytes(size) if size >= 1 << 20 else f'{size:,} bytes'}", markup=False)
    for note in notes:
        page.print(f"note: {note}", markup=False)
    return 0


def _check_is_free(out: Path) -> None:
    """Refuse to write where anything is."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is there, and no folder: name one that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: empty it, or name a folder that is not there yet")


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` that becomes it in one step, or goes with all that is in it if anything fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    folder = scratch / "folder"  # whose mode is a usual folder's, while the one around it is closed to others
    try:
        folder.mkdir()
        yield folder
        if out.is_dir():
            out.rmdir()  # which only an empty one allows
        folder.rename(out)
    except OSError as error:
        raise XinferError(f"{out}: can't be written ({error}): make room, or name another folder") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
