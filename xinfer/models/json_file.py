"""JSON files that came with a checkpoint, read within limits."""

__all__ = ["read_object"]

import json
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError

_LIMIT = 32 << 20  # bytes, parsed within a second: an index of 300,000 tensors, if each takes a hundred


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a file that is none, or too large to be one, is a `ModelError`."""
    if file.exists() and not file.is_file():  # reading a pipe would wait for ever
        raise ModelError(f"{file}: not a file, though its name says so: replace it by the checkpoint's own")
    try:
        if (size := file.stat().st_size) > _LIMIT:
            raise ModelError(f"{file}: {size} bytes, more than the {_LIMIT} that are read: replace it")
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: a JSON object is expected, not {type(content).__name__}")
    return content
