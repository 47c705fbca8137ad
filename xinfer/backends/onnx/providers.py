"""Which of ONNX Runtime's execution providers compute: asked for by name, or CUDA where it works, or the CPU."""

__all__ = ["CPU", "CUDA", "Choice", "Providers", "choose", "cuda_problem", "has_gpu", "parse"]

import contextlib
import ctypes
import io
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from xinfer.backends.onnx.operators import takes
from xinfer.devices import choose_device
from xinfer.errors import ConfigError, DeviceError
from xinfer.hardware import onnxruntime_shadowed

log = logging.getLogger(__name__)

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
Providers = list[tuple[str, dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a model is computed.

    Attributes:
        device: the CPU, also where a provider of another device does the work for it; or a CUDA device, whose cache
            lies in blocks.
        providers: for the session, most wanted first, with their options; the CPU is the last.
    """

    device: torch.device
    providers: Providers


def choose(config: Any, dtype: str = "auto") -> Choice:
    """Return where `backend.device` and `backend.providers` want a model of this `model.dtype` computed.

    `auto` without providers is CUDA where that works, else the CPU; where there is a GPU, a warning says why. CUDA that
    was asked for and does not work is a `DeviceError`, which says the same.
    """
    named, device = parse(config), str(config.device)
    cuda = named[0][0] == CUDA if named else device != "cpu"
    if named and device != "auto" and device.startswith("cuda") != cuda:
        names = ", ".join(name for name, _ in named)
        raise ConfigError(f"backend.device={device} contradicts backend.providers=[{names}]: leave one out")
    if not cuda or (not named and device == "auto" and not has_gpu()):
        return Choice(torch.device("cpu"), named or [(CPU, {})])
    if not device.startswith(("auto", "cuda")):
        choose_device(device)  # which says what there is
    number = named[0][1].get("device_id") if named else None
    wanted = f"cuda:{number}" if number else device.replace("auto", "cuda")
    problem = cuda_problem(dtype, wanted)
    if problem is None:
        return Choice(choose_device(wanted), named or [(CUDA, {}), (CPU, {})])
    if named or device != "auto":
        raise DeviceError(f"backend=onnx can't compute on CUDA: {problem}")
    log.warning("backend=onnx computes on the CPU: %s; or ask for it (backend.device=cpu)", problem)
    return Choice(torch.device("cpu"), [(CPU, {})])


def has_gpu() -> bool:
    """Whether this machine has a device of NVIDIA's, whatever can be done with it."""
    return Path("/proc/driver/nvidia").exists() or torch.cuda.is_available()


def parse(config: Any) -> Providers:
    """Return the providers of `backend.providers` with their options, and the CPU last; none where none are named."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    found: Providers = []
    for entry in config.providers:
        pairs = list(entry.items()) if isinstance(entry, dict) else [(entry, None)]
        if len(pairs) != 1 or not isinstance(pairs[0][1] or {}, dict):
            raise ConfigError(f"backend.providers has {entry!r}: a name or {{name: {{option: value}}}} is expected")
        name, options = str(pairs[0][0]), pairs[0][1] or {}
        if name not in there:
            raise ConfigError(f"backend.providers has {name!r}, which is not there (there are: {', '.join(there)})")
        found.append((name, {str(key): str(value) for key, value in options.items()}))
    if found and CPU not in dict(found):
        found.append((CPU, {}))
    return found


def cuda_problem(dtype: str = "auto", device: str = "cuda") -> str | None:
    """Return why a model of this precision can't be computed on a CUDA device, and what to do; None where it can."""
    import onnxruntime

    version, there = onnxruntime.__version__, onnxruntime.get_available_providers()
    if CUDA not in there:
        advice = onnxruntime_shadowed() or "uninstall onnxruntime, then install onnxruntime-gpu"
        return f"onnxruntime {version} has no {CUDA} (it has: {', '.join(there)}): {advice}"
    if dtype in ("float32", "fp32"):
        return "its attention there has no float32: take model.dtype=bfloat16"
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA: install one with it (https://pytorch.org/get-started)"
        )
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: see whether nvidia-smi lists one"
    if not takes("PagedAttention", "attention_metadata"):
        return f"onnxruntime {version} can't tell PagedAttention of lengths: install onnxruntime-gpu 1.31 or later"
    if (error := _load_error(choose_device(device).index or 0)) is not None:
        built = getattr(onnxruntime, "cuda_version", "") or "its version"
        return (
            f"{CUDA} can't be loaded ({error}): it needs the libraries of CUDA {built} and cuDNN 9, which come with a "
            f"torch for that CUDA (torch {torch.__version__} is for {torch.version.cuda})"
        )
    return None


@cache
def _load_error(number: int) -> str | None:
    """Load the provider for good, for the device of this number; return why that failed, None if it did not.

    The runtime itself says so on the process's standard error only and goes on without the provider. Afterwards the
    library can be opened here in safety: if something that it needs is missing, that fails by naming it; else the
    runtime has made it ready already.
    """
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(OSError):
            onnxruntime.preload_dlls(directory="")  # from wheels of CUDA's libraries, which it prints if it misses
    onnxruntime.set_default_logger_severity(4)
    try:
        options = {"device_id": str(number)}
        session = onnxruntime.InferenceSession(_smallest(), providers=[(CUDA, options)], enable_fallback=0)
        if CUDA in session.get_providers():
            return None
    except Exception as error:  # the runtime's own are of no common kind
        return " ".join(str(error).split())
    finally:
        onnxruntime.set_default_logger_severity(2)
    try:
        ctypes.CDLL(str(Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return "onnxruntime does not say why; a driver that is too old is likely"


def _smallest() -> bytes:
    """Return the smallest of models, one addition."""
    import onnx_ir as ir

    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=(1,))
    node = ir.node("Add", [x, x])
    y = node.outputs[0]
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, ir.Shape((1,))
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": 21}, name="smallest")
    proto: bytes = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return proto
