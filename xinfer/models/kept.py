"""Tensors that take long to make, kept in the cache folder under a hash of what they are made from."""

__all__ = ["checkpoint_key", "code_hash", "kept"]

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from time import perf_counter

from safetensors.torch import save_file
from torch import Tensor

import xinfer.models.quantize
from xinfer.errors import ModelError
from xinfer.models.cache import cache_folder
from xinfer.models.lazy import Lazy
from xinfer.models.model import Model
from xinfer.models.safetensors_reader import read_safetensors

log = logging.getLogger(__name__)


def kept(
    owner: str, key: str, wanted: Collection[str], make: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Return tensors by name, mapped from the file of this key when they are asked for; made now if they lack.

    `owner` is the folder of whoever has made them, within the cache folder.
    """
    file = cache_folder() / owner / "weights" / f"{key}.safetensors"
    found = _read(file, wanted)
    if found is None:
        started = perf_counter()
        _write(file, make())
        found = _read(file, wanted)
        assert found is not None
        log.info("tensors made", extra={"seconds": perf_counter() - started, "file": str(file)})
    return found


def checkpoint_key(model: Model, *more: object) -> str:
    """Return a hash of the checkpoint's files, what is merged into them, the code that rounds, and more."""
    code = code_hash(Path(xinfer.models.quantize.__file__).parent)
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in model.weights.files]
    adapter = None if model.adapter is None else model.adapter.scale
    return hashlib.sha256(repr((files, adapter, *more, code)).encode()).hexdigest()[:32]


def code_hash(folder: Path, modules: Iterable[str] = ("*",)) -> str:
    """Return a hash of the modules in a folder, or of those of these names."""
    code = hashlib.sha256()
    for source in sorted({source for name in modules for source in folder.glob(f"{name}.py")}):
        code.update(source.read_bytes())
    return code.hexdigest()


def _read(file: Path, wanted: Collection[str]) -> Mapping[str, Tensor] | None:
    """Return the tensors of a file that holds all that are wanted."""
    try:
        tensors = read_safetensors([file])
    except ModelError:
        return None
    return Lazy(wanted, tensors.load) if set(wanted) <= tensors.shapes.keys() else None


def _write(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Write beside the file, which then takes its place at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=file.parent)
    os.close(handle)
    try:
        save_file({name: each.contiguous() for name, each in weights.items()}, temporary)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
