"""The energy that a device has taken, where it tells."""

__all__ = ["EnergyMeter"]

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

_ROOT = Path("/")


class EnergyMeter:
    """Adds up what a device takes, everything that runs on it included, between `start` and `stop`.

    A GPU's counter is read through NVML (millijoules since the driver was loaded), where the package nvidia-ml-py is
    installed; a processor's from Linux's RAPL zones (microjoules, wrapping around), which most systems let only root
    read. Where there is neither, `source` says so and the joules are None.

    Attributes:
        source: which counter it is, or why there is none.
    """

    def __init__(self, device: torch.device, root: Path = _ROOT) -> None:
        counters, self.source = _gpu(device) if device.type == "cuda" else _packages(root)
        self._counters, self._before = counters, [0.0] * len(counters)

    def start(self) -> None:
        """Note the counters."""
        self._before = [counter() for counter, _ in self._counters]

    def stop(self) -> float | None:
        """Return the joules since `start`; None where nothing counts them."""
        if not self._counters:
            return None
        pairs = zip(self._counters, self._before, strict=True)
        return sum((counter() - before) % wrap for (counter, wrap), before in pairs)


Counters = list[tuple[Callable[[], float], float]]  # joules, and where they begin again


def _packages(root: Path) -> tuple[Counters, str]:
    """Return the counters of a processor's packages; the zones within them are parts of the same energy."""
    found: Counters = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        file, most = zone / "energy_uj", zone / "max_energy_range_uj"
        if zone.name.count(":") > 1:
            continue
        try:
            wrap = int(most.read_text()) / 1e6
            _joules(file)
        except (OSError, ValueError) as error:
            return [], f"none: {file} can't be read ({error})"
        found.append((lambda file=file: _joules(file), wrap))  # type: ignore[misc]
    return found, "RAPL" if found else "none: the processor tells nothing (no RAPL zones)"


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def _gpu(device: torch.device) -> tuple[Counters, str]:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # an old driver, a GPU that does not count, or no package: whatever NVML raises
        return [], f"none: NVML does not tell ({type(error).__name__}: {error})"
    return [(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, float("inf"))], "NVML"
