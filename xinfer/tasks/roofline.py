"""How near a run came to what memory allows: the time that reading weights and cache alone would have taken."""

__all__ = ["Roofline"]

from typing import Any

import torch

from xinfer import hardware
from xinfer.engine.outputs import StepOutput
from xinfer.engine.runner import RunnerInfo
from xinfer.models.cache import cache_folder


class Roofline:
    """Adds up what the decode steps of a run had to read, and how long they took."""

    def __init__(self) -> None:
        self.steps, self.milliseconds, self.kv_tokens = 0, 0.0, 0

    def add(self, output: StepOutput) -> None:
        """Count a step, if it only decoded."""
        if output.stats.stage == "decode":
            self.steps += 1
            self.milliseconds += output.stats.step_ms
            self.kv_tokens += output.stats.kv_tokens

    def figures(self, info: RunnerInfo) -> dict[str, Any] | None:
        """Return floor and share; None where nothing was decoded, or the runner does not say what it reads.

        floor = (steps x step_read_bytes + tokens read x kv_token_bytes) / read bandwidth of the device, which is
        measured once per machine and kept in the cache folder.
        """
        if not self.steps or not info.step_read_bytes:
            return None
        speed = hardware.speed(torch.device(info.device), cache=cache_folder())
        read = self.steps * info.step_read_bytes + self.kv_tokens * info.kv_token_bytes
        floor = read / speed.read_bytes_s * 1e3
        return {
            "read_bytes_per_step": round(read / self.steps),
            "read_bandwidth_bytes_s": speed.read_bytes_s,
            "floor_ms_per_step": floor / self.steps,
            "step_ms": self.milliseconds / self.steps,
            "share": floor / self.milliseconds,
        }
