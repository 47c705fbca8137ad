"""A clock that nobody waits for, and a runner that takes its time by it: runs whose figures no machine changes."""

__all__ = ["TimedRunner", "VirtualClock"]

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from xinfer.engine.types import Batch
from xinfer.testing.fake import FakeRunner


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, milliseconds: float) -> None:
        """Let time pass."""
        self.now += milliseconds / 1e3


class TimedRunner(FakeRunner):
    """A `FakeRunner` whose steps take `fixed_ms`, and so much for each token computed and each token of context.

    Args:
        clock: the engine's.
        fixed_ms, token_ms, context_ms: by default about those of a small model on a few cores, for which a step with
            one token costs nearly as much as one with twenty.
        token_bytes: of keys and values of one token, which makes the cache's size in bytes.
        stall: milliseconds more for the step of this number, counted from one.
        options: `FakeRunner`'s.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        fixed_ms: float = 20.0,
        token_ms: float = 0.5,
        context_ms: float = 0.001,
        token_bytes: int = 1024,
        stall: Callable[[int], float] = lambda step: 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.info = replace(self.info, kv_token_bytes=token_bytes, kv_cache_bytes=self.info.kv_tokens * token_bytes)
        self._clock, self._stall = clock, stall
        self._costs = fixed_ms, token_ms, context_ms

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute, and let the time pass that it takes."""
        logits = super().forward(batch)
        fixed, token, context = self._costs
        work = token * len(batch.token_ids) + context * int(batch.context_lens.sum())
        self._clock.advance(fixed + work + self._stall(self.steps))
        return logits
