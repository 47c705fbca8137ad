"""What a run rests on: hashes of its model, the state of xinfer's own code; gathered beside the run."""

__all__ = ["Provenance"]

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class Provenance:
    """Computes hashes on a thread of its own, so that a run does not wait for them before its end.

    Args:
        hashes: by name, functions that return a hash, or None where there is nothing to hash.
    """

    def __init__(self, hashes: Mapping[str, Callable[[], str | None]]) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="provenance")
        self._hashes = {name: pool.submit(compute) for name, compute in hashes.items()}
        self._git = pool.submit(git_state, Path(__file__).parent)
        pool.shutdown(wait=False)

    def result(self) -> dict[str, Any]:
        """Return `hashes`, the `content_hash` over all of them, and `git`; waits where they are not ready."""
        hashes = {name: future.result() for name, future in self._hashes.items()}
        content = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        return {"hashes": hashes, "content_hash": content, "git": self._git.result()}


def combined(hashes: list[str]) -> str | None:
    """Return one hash for several files: the file's own for one, none for none."""
    if len(hashes) < 2:
        return hashes[0] if hashes else None
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and whether anything differs from it, or None where xinfer was not run from a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", "--", str(folder)):
            return None  # inside somebody else's repository, an environment in a project's folder say
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", ".."))}
    except (OSError, subprocess.SubprocessError):
        return None
