"""What this machine is and what it can do: memory, cores, versions, read bandwidth, matrix products."""

__all__ = [
    "Gpu",
    "Hardware",
    "Speed",
    "available_memory",
    "describe",
    "gibibytes",
    "known_speed",
    "measure",
    "onnx_providers",
    "onnxruntime_shadowed",
    "peak_memory",
    "speed",
    "versions",
]  # fmt: skip

import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from hashlib import sha256
from importlib import import_module, metadata
from itertools import cycle
from pathlib import Path
from time import perf_counter, strftime

import psutil
import torch

log = logging.getLogger(__name__)

_ROOT = Path("/")
_PACKAGES = "xinfer torch numpy tokenizers safetensors onnxruntime onnxruntime-gpu transformers gguf hydra-core"
_FILE = "hardware.json"
_SECONDS, _LONGEST = 1.0, 0.05  # what measuring takes, and what one call in it may take


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device: its memory in bytes, and the version of the kernel's driver where that can be read."""

    name: str
    memory: int
    capability: str
    driver: str | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run ran on; `key` stays the same for as long as what was measured here holds."""

    cpu: str
    physical_cores: int
    logical_cores: int  # that this process may use, by its affinity and its cgroup's quota
    threads: int  # that torch computes with
    instruction_sets: tuple[str, ...]  # as /proc/cpuinfo spells them; asimd is NEON
    torch_kernels: str  # which of its own torch chose, such as AVX512
    memory: int  # bytes, of the machine or its cgroup
    platform: str
    python: str
    gpus: tuple[Gpu, ...]
    key: str


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device reaches: bytes read a second, operations a second in matrix products, and the (ISO) day."""

    read_bytes_s: float
    fp32_flop_s: float
    bf16_flop_s: float
    fp16_flop_s: float
    measured: str

    def flop_s(self, dtype: torch.dtype) -> float:
        """Return the operations a second in matrix products of float32, bfloat16 or float16."""
        kinds = {torch.float32: self.fp32_flop_s, torch.bfloat16: self.bf16_flop_s, torch.float16: self.fp16_flop_s}
        return kinds[dtype]


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be taken on a device; on the CPU within its cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = [limit - used for limit, used in _cgroup_memory(_ROOT)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def peak_memory() -> int:
    """Return the most bytes that this process has held resident."""
    # The second choice is ru_maxrss, which on Linux includes what the process that started this one held.
    if peak := _field(_ROOT / "proc/self/status", "VmHWM").split():
        return int(peak[0]) * 1024
    resource = import_module("resource")  # not on Windows
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if platform.system() == "Darwin" else 1024)


def gibibytes(count: float) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _field(path: Path, name: str) -> str:
    """Return what stands in a file's first line that begins with a name; an empty text if none does."""
    found = re.search(rf"^{name}[ \t:]*(.*)$", _read(path), re.MULTILINE)
    return found[1] if found else ""


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders that limit this process, of version 2 and 1, from its own up to the top and beyond."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            # A container may see its path on the host, which is not there: the walk up still meets its own top.
            own = Path(f"{root}/sys/fs/cgroup/{controllers and controller}/{path.replace('..', '')}")
            yield from (own, *own.parents)


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes for each limit; pages cached from files can be had back, so they don't count."""
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        stat = folder / "memory.stat"
        cached = _field(stat, "total_inactive_file") or _field(stat, "inactive_file")
        if limit.strip().isdigit():  # not "max"
            yield int(limit), max(0, int(used or 0) - int(cached or 0))


def _logical_cores(root: Path) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups(root, "cpu"):
        one = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")
        if found := re.match(r"(\d+)\s+(\d+)", one):  # neither "max" nor -1
            cores = min(cores, -(-int(found[1]) // int(found[2])))
    return max(1, cores)


def describe() -> Hardware:
    """Return what this machine is, without measuring anything."""
    info = _ROOT / "proc/cpuinfo"
    cpu = _field(info, "model name") or platform.processor() or platform.machine()
    if family := _field(info, "cpu family"):  # in a virtual machine the name may be no more than "AMD EPYC"
        cpu += f" (family {family}, model {_field(info, 'model')})"
    flags = _field(info, "flags") or _field(info, "Features")
    driver = _field(_ROOT / "proc/driver/nvidia/version", r"NVRM version:\D*").split(" ")[0] or None
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    total = psutil.virtual_memory().total
    found = Hardware(
        cpu=cpu,
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        logical_cores=_logical_cores(_ROOT),
        threads=torch.get_num_threads(),
        instruction_sets=tuple(re.findall(r"\b(f16c|fma|avx\w*|amx_\w+|asimd\w*|i8mm|bf16|sve\w*)\b", flags)),
        torch_kernels=torch.backends.cpu.get_cpu_capability(),
        memory=min([total, *(limit for limit, _ in _cgroup_memory(_ROOT))]),
        platform=platform.platform(),
        python=platform.python_version(),
        gpus=tuple(Gpu(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}", driver) for gpu in gpus),
        key="",
    )
    # Memory in whole GiB, for from one boot to the next a system keeps a little more or less of it for itself.
    determining = replace(found, memory=round(total / 2**30), platform=str(torch.__version__), python="")
    return replace(found, key=sha256(repr(determining).encode()).hexdigest()[:16])


def versions() -> dict[str, str]:
    """Return the installed versions by distribution, without importing any; those not installed are left out."""
    found = {"xinfer": "unknown", "python": platform.python_version()}
    for name in _PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def onnxruntime_shadowed() -> str | None:
    """Return a warning where two builds of ONNX Runtime lie in one folder, so that CUDA may be hidden."""
    builds = [f"{name} {version}" for name, version in versions().items() if name.startswith("onnxruntime")]
    advice = "share one folder, where the CPU build hides CUDA: uninstall both, then install onnxruntime-gpu alone"
    return f"{' and '.join(builds)} {advice}" if len(builds) > 1 else None


def onnx_providers() -> list[str]:
    """Return the execution providers of ONNX Runtime, most wanted first; none where it can't be imported."""
    with suppress(ImportError, OSError, AttributeError):  # the last: a folder that an uninstall left behind
        return list(import_module("onnxruntime").get_available_providers())
    return []


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    started = perf_counter()
    call()
    torch.get_device_module(device).synchronize(device)
    return perf_counter() - started


def _reads(device: torch.device) -> Iterator[tuple[float, Callable[[], object]]]:
    """Yield the bytes and the reading of one window of a buffer far larger than the caches of all cores."""
    wanted, count = max(512, 64 * torch.get_num_threads()) << 20, 16
    if device.type == "cuda":
        wanted, count = 4 << 30, 2  # beside which it takes no time to launch a kernel and wait for it
    length = max(1 << 20, min(wanted, available_memory(device) // 4)) // 4 // count
    windows = cycle(torch.ones(count, length, device=device).unbind())  # being written maps the pages
    yield length * 4, lambda: next(windows).sum()


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, Callable[[], object]]]:
    """Yield the operations and the product of square matrices, twice as large each time, until the next takes long."""
    # The first size is for float16 on processors without it: 512 already takes a quarter of a second there.
    for size in (256, 512, 1024, 2048, 4096, 8192)[: 6 if device.type == "cuda" else 4]:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        product = partial(torch.mm, matrix, matrix)
        yield 2.0 * size**3, product
        if 8 * min(_seconds(product, device) for _ in range(3)) > _LONGEST:
            return


@contextmanager
def _spread() -> Iterator[None]:
    """Hold torch's threads on a core each; beside other work Linux may leave two on one for seconds, taking turns."""
    masks: dict[int, set[int]] = {}
    with suppress(OSError, AttributeError):  # it is not allowed, or not Linux
        busiest = sorted(psutil.Process().threads(), key=lambda thread: -thread.user_time - thread.system_time)
        siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = {_read(_ROOT / siblings.format(cpu)) or cpu: cpu for cpu in sorted(os.sched_getaffinity(0))}
        for thread, cpu in zip(busiest[: torch.get_num_threads()], cores.values(), strict=False):
            masks[thread.id] = os.sched_getaffinity(thread.id)
            os.sched_setaffinity(thread.id, {cpu})
    try:
        yield
    finally:
        for thread_id, mask in masks.items():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(thread_id, mask)


@torch.inference_mode()
def measure(device: torch.device) -> Speed:
    """Measure a device in about a second and a half, with torch's threads: the best of many short calls.

    Reading is a plain fp32 `sum`, in windows so short that some pass between what else the machine does. On an AMD EPYC
    (Zen 4, 2 cores, torch 2.13, 2026-11-29) it read 59.8 GB/s, in turns with a compiled `(W * x).sum(-1)` at 57.9, and
    in windows 59.6, with hand-written AVX-512 loads at 62.5. A core sums 70 GB/s out of its cache: memory is the bound.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kinds = [list(_reads(device)), *(list(_products(device, dtype)) for dtype in dtypes)]
    best, end = [0.0] * len(kinds), perf_counter() + _SECONDS
    with _spread():
        while perf_counter() < end:  # in turns, so that no disturbance spoils all calls of a kind
            for i, kind in enumerate(kinds):
                for amount, call in kind:
                    turn = perf_counter() + _SECONDS / 20 / len(kind)
                    while perf_counter() < turn:
                        best[i] = max(best[i], amount / _seconds(call, device))
    return Speed(best[0], best[1], best[2], best[3], strftime("%Y-%m-%d"))


def _kept(cache: Path) -> dict[str, Speed]:
    """Return what is kept, by machine and device; nothing where there is no file or a damaged one."""
    with suppress(ValueError, AttributeError, TypeError, RecursionError):
        kept = [(place, Speed(**entry)) for place, entry in json.loads(_read(cache / _FILE)).items()]
        return {place: one for place, one in kept if min(astuple(one)[:-1]) > 0}
    return {}


def known_speed(device: torch.device, *, cache: Path) -> Speed | None:
    """Return what `speed` has kept for this device, machine and number of threads, if it has."""
    return _kept(cache).get(f"{describe().key} {device}")


def speed(device: torch.device, *, cache: Path, again: bool = False) -> Speed:
    """Return what a device reaches, measured once per machine and number of threads and kept in a file in `cache`.

    With `again` it is measured again, and the higher of old and new counts, for a disturbance only lowers it. A cache
    that can't be written is a warning.
    """
    known = known_speed(device, cache=cache)
    if known and not again:
        return known
    found = measure(device)
    found = Speed(*map(max, astuple(known or found), astuple(found)))
    kept = _kept(cache) | {f"{describe().key} {device}": found}
    temporary = cache / f"{_FILE}.{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({place: asdict(one) for place, one in kept.items()}, indent=2))
        os.replace(temporary, cache / _FILE)
    except OSError as error:
        log.warning("what was measured can't be kept", extra={"cache": str(cache), "error": str(error)})
    return found
