"""The folder where xinfer keeps what was fetched or measured once, and hashes of files."""

__all__ = ["cache_folder", "file_sha256"]

import hashlib
import json
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from xinfer.errors import FetchError

_SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> Path:
    """Return where fetched models and remembered hashes are kept: `XINFER_CACHE`, by default ~/.cache/xinfer."""
    try:
        return Path(os.environ.get("XINFER_CACHE") or "~/.cache/xinfer").expanduser().absolute()
    except RuntimeError as error:  # a user without a home
        raise FetchError(f"no cache folder ({error}): set XINFER_CACHE to a folder that can be written") from error


def file_sha256(path: Path) -> str:
    """Return a file's sha256 in hex, remembered in the cache folder for as long as path, size and mtime are the same.

    A damaged memory is begun anew, and one that can't be written is done without.
    """
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())  # taken before reading: a file that changes meanwhile is hashed again
        key, state = str(path.resolve()), [status.st_size, status.st_mtime_ns]
        entry = _remembered().get(key)
        if isinstance(entry, list) and entry[:2] == state and _SHA256.fullmatch(str(entry[-1])):
            return str(entry[-1])
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _remember(key, [*state, digest])
    return digest


def _remembered() -> dict[str, Any]:
    try:
        entries = json.loads((cache_folder() / "hashes.json").read_bytes())
    except (OSError, ValueError, RecursionError, FetchError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _remember(key: str, entry: list[Any]) -> None:
    with suppress(OSError, FetchError):
        entries = {path: known for path, known in _remembered().items() if Path(path).exists()} | {key: entry}
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            written = Path(scratch, "hashes.json")
            written.write_text(json.dumps(entries, indent=1), "utf-8")
            written.replace(folder / "hashes.json")
