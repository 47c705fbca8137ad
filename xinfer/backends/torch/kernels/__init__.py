"""Operators of the torch decoder for CPUs, in C++: `torch.ops.xinfer.linear`, `experts`, `attention`, ...

They are compiled for this processor when they are first needed, and kept in the cache folder. torch has such operators,
but on a CPU they read weights at a fraction of the memory's speed when there are few rows, and a cache in blocks has to
be gathered for them.
"""

__all__ = ["available", "build_key", "compiler"]

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from time import perf_counter

import torch
from filelock import FileLock
from torch import Tensor, library

from xinfer.models.cache import cache_folder

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")

_VALUE_DIM = 7  # its place among the arguments of `attention`, after the queries


def compiler() -> str | None:
    """Return the C++ compiler: `CXX`, else g++ or clang++; None where there is none."""
    found = (shutil.which(each) for each in (os.environ.get("CXX"), "g++", "clang++") if each)
    return next(filter(None, found), None)


@cache
def available() -> bool:
    """Load the operators, compiled now if they are not there; False where they can't be, which is logged."""
    if not (sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64", "aarch64")):
        return False
    cxx = compiler()
    if cxx is None:
        log.warning("there is no C++ compiler (g++ or clang++), without which backends of torch are slower on a CPU")
        return False
    try:
        torch.ops.load_library(str(_library(cxx)))  # type: ignore[no-untyped-call]
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("operators for this processor could not be compiled, so that torch's own are used: %s", error)
        return False
    _describe()
    return True


def _library(cxx: str) -> Path:
    """Return the compiled library."""
    file = cache_folder() / "torch" / "kernels" / f"{build_key()}.so"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            log.warning("operators are compiled for this processor; this takes some seconds, once")
            started = perf_counter()
            _compile(cxx, file)
            log.info("operators compiled", extra={"seconds": perf_counter() - started, "file": str(file)})
    return file


def _compile(cxx: str, file: Path) -> None:
    root = Path(torch.__file__).parent
    headers = [f"-I{root / each}" for each in ("include", "include/torch/csrc/api/include")]
    options = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *headers]
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        objects = {source: Path(scratch, f"{source.stem}.o") for source in sorted(_FOLDER.glob("*.cpp"))}
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda each: _run(cxx, *options, "-c", each[0], "-o", each[1]), objects.items()))
        made = Path(scratch, file.name)
        _run(cxx, *_FLAGS, "-shared", *objects.values(), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-o", made)
        made.replace(file)


def _run(cxx: str, *arguments: str | Path) -> None:
    done = subprocess.run([cxx, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise OSError(f"{cxx}: {errors[0] if errors else done.stderr[-200:]}")


@cache
def build_key() -> str:
    """Return a hash of what compiled code depends on: source, torch, compiler, and this processor's features."""
    cxx = compiler() or ""
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False).stdout if cxx else b""
    digest = hashlib.sha256(repr((cxx, _FLAGS, torch.__version__, _features())).encode() + version)
    for file in sorted(_FOLDER.glob("*.[ch]*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _encoded(entries: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    width = entries.shape[1]
    scales = width // dim * torch.float32.itemsize
    return entries.new_empty(entries.shape[0], (scales + width + 3) // 4 * 4, dtype=dtype)


def _queries(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, kv_heads: int, interleaved: bool
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * kv_heads, qkv.shape[2])


def _describe() -> None:
    """Tell torch the shapes of what the operators return, so that graphs can be made of them."""
    shapes: dict[str, Callable[..., Tensor]] = {
        "linear": lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
        "linear_codes": lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]),
        "experts": lambda x, weight, chosen, *_: x.new_empty(*chosen.shape, weight.shape[1]),
        "experts_codes": lambda x, codes, scales, zeros, chosen, *_: x.new_empty(*chosen.shape, codes.shape[1]),
        "rows_of_codes": lambda codes, scales, zeros, at, bits, columns: scales.new_empty(at.shape[0], columns),
        "encode_entries": _encoded,
        "rotate_and_store": _queries,
        "attention": lambda q, *rest: q.new_empty(q.shape[0], q.shape[1] * rest[_VALUE_DIM]),
    }
    for name, shape in shapes.items():
        library.register_fake(f"xinfer::{name}", shape)
