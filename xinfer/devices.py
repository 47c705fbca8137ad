"""Which device and which precision a configuration means, and what a cache may take there."""

__all__ = ["cache_budget", "choose_device", "choose_dtype"]

import torch

from xinfer.engine.types import Limits
from xinfer.errors import ConfigError, DeviceError
from xinfer.hardware import available_memory
from xinfer.processes import count, rank

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_CACHE = 1 << 30  # bytes of KV cache that a CPU takes unasked, if that holds one whole context
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def choose_device(wanted: str, processes: int = 1) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`; one that is not there is an error listing those.

    Of several processes on a machine, the first takes the first device for `auto` and `cuda`, and so on.
    """
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    own = f"cuda:{rank() % count(here=True) if processes > 1 else 0}"
    if wanted == "auto":
        wanted = "cuda" if len(there) > 1 else "cpu"
    name = own if wanted == "cuda" else wanted
    if name not in there:
        raise DeviceError(f"backend.device={wanted!r} is not there (there are: {', '.join(there)})")
    return torch.device(name)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the precision; `auto` is float32 on a CPU, where it can be reproduced best, and bfloat16 on a GPU."""
    name = _ALIASES.get(wanted, wanted)
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"model.dtype={wanted!r} is unknown (known: auto, {', '.join([*_DTYPES, *_ALIASES])})")
    return _DTYPES[name]


def cache_budget(limits: Limits, whole: int, device: torch.device) -> float:
    """Return the bytes that the KV cache may take, where one whole context takes `whole`.

    Unasked, a GPU gives 85 % of what is free; a CPU 1 GiB, or what one whole context needs, within half of its memory.
    """
    free = available_memory(device)
    if limits.kv_memory is None:
        return free * 0.85 if device.type == "cuda" else min(max(_CPU_CACHE, whole), free / 2)
    return free * limits.kv_memory if limits.kv_memory <= 1 else min(limits.kv_memory, free)
