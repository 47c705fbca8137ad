"""What this machine is and what it can do: memory, read bandwidth, matrix multiplication."""

__all__ = ["available_memory", "gibibytes"]

import psutil
import torch


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be taken on a device; on the CPU within its cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def gibibytes(count: float) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
