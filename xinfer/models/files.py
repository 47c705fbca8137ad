"""A checkpoint's small files, of which nothing is believed."""

__all__ = ["read_file", "read_json", "refusing"]

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError

_LARGEST = 1 << 27  # bytes; the largest tokenizer.json in use has some 40 million
_LARGEST_JSON = 1 << 25  # bytes, parsed within a second: an index of 300,000 tensors, if each takes a hundred


def read_file(file: Path, largest: int = _LARGEST) -> bytes:
    """Return a file's content; one that can't be read, or is far larger than any in use, is a `ModelError`."""
    if file.exists() and not file.is_file():  # reading a pipe would wait for ever
        raise ModelError(f"{file}: not a file, though its name says so: replace it by the checkpoint's own")
    try:
        size = file.stat().st_size
        if size > largest:
            raise ModelError(f"{file}: {size} bytes, more than the {largest} that are read: replace it")
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file}: can't be read ({error}): download it again") from error


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    """Return a file's JSON object, or an empty one where the file is `optional` and missing."""
    if optional and not file.is_file():
        return {}
    try:
        content = json.loads(read_file(file, _LARGEST_JSON).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: a JSON object is expected, not {type(content).__name__}")
    return content


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Have whatever the tokenizer library raises inside be a `ModelError` that begins with `where`.

    It raises plain Exception for what makes no tokenizer, and where its code panics no Exception at all.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{where} ({str(error)[:200]}): download it again") from error
