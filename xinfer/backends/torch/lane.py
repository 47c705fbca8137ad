"""A CUDA device's second stream, on which layers come while others compute, and what orders the two."""

__all__ = ["Lane", "Mark"]

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Mark = torch.cuda.Event  # a place in a stream


class Lane:
    """Copies beside the computing stream, which is whichever is current where layers are computed with."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pauses: deque[tuple[Mark, Mark]] = deque()

    def computed(self) -> Mark:
        """Return the mark behind all that was started on the computing stream."""
        return self._mark(torch.cuda.current_stream(self._device))

    def compute_after(self, copied: Mark, reached: Mark) -> None:
        """Have the computing stream go on behind a copy's mark; it has waited since it came to `reached`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        self._pauses.append((reached, self._mark(stream)))

    def uses(self, weight: Tensor) -> None:
        """Hear of what the computing stream reads: its memory is nobody's before that is over, even if it is let go."""
        weight.record_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def copying(self, after: Mark | None) -> Iterator[None]:
        """Have this thread's work on the device go to the lane, behind a mark."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def copied(self) -> Mark:
        """Return the mark behind all that was started on the lane."""
        return self._mark(self._stream)

    def waited(self) -> float:
        """Return the seconds that the computing stream is known to have waited since this was last asked."""
        seconds = 0.0
        while self._pauses and self._pauses[0][1].query():  # type: ignore[no-untyped-call]
            reached, resumed = self._pauses.popleft()
            seconds += reached.elapsed_time(resumed) / 1e3
        return seconds

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(stream)
        return mark
