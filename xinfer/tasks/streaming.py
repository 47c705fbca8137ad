"""What it cost a run that not all layers were in memory."""

__all__ = ["Streaming"]

from typing import Any

from xinfer.engine.outputs import StepOutput
from xinfer.engine.runner import RunnerInfo


class Streaming:
    """Adds up how long steps were, and how long they waited for layers."""

    def __init__(self) -> None:
        self.steps, self.tokens, self.waited_ms, self.milliseconds = 0, 0, 0.0, 0.0

    def add(self, output: StepOutput) -> None:
        """Count a step, if it computed anything."""
        stats = output.stats
        if stats.stage != "idle":
            self.steps += 1
            self.tokens += stats.generated_tokens
            self.waited_ms += stats.stream_wait_ms or 0.0
            self.milliseconds += stats.step_ms

    def figures(self, info: RunnerInfo) -> dict[str, Any] | None:
        """Return slots, bytes brought in for each generated token, and the share of steps spent waiting for them.

        None where all layers were in memory, or nothing was computed.
        """
        if not info.stream_slots or not self.steps:
            return None
        return {
            "slots": info.stream_slots,
            "bytes_per_step": info.stream_bytes,
            "bytes_per_token": round(info.stream_bytes * self.steps / self.tokens) if self.tokens else None,
            "wait_share": self.waited_ms / self.milliseconds,
        }
