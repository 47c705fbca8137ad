"""Layers that are not all in memory: some stay, the others are brought in ahead of their use, again in every step."""

__all__ = ["LayerStream", "StreamPlan", "reading_anew"]

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from xinfer.backends.torch.arena import Arena
from xinfer.backends.torch.lane import Lane, Mark
from xinfer.backends.torch.load import Get, Load, is_matrix
from xinfer.backends.torch.threads import compute_alone
from xinfer.models.mapped_file import copied
from xinfer.models.reader import read
from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Weights


def _coming(count: int, slots: int) -> list[int]:
    """Return which of so many layers are brought in in every step, where so many can be there at once.

    Two slots take turns, or the only one; each further slot keeps a layer. Those that stay are spread over the model:
    while they compute there is time to bring in those between.
    """
    coming = count - max(0, slots - 2)
    return [index * count // coming for index in range(coming)]


class StreamPlan(NamedTuple):
    """How layers are streamed.

    Attributes:
        slots: layers that are there at once; 0 where all are.
        bytes: of the layers that a step brings in.
        turning_bytes: of the slots that these take turns in.
    """

    slots: int = 0
    bytes: int = 0
    turning_bytes: int = 0

    @classmethod
    def of(cls, spec: DecoderSpec, slots: int | None, size: Callable[[str, tuple[int, ...]], int]) -> Self:
        """Return what it means that so many layers are there at once, where `size` tells a tensor's bytes."""
        count = len(spec.layers)
        if slots is None or slots == count:
            return cls()
        sizes = Counter[int]()
        for name, shape in spec.tensors.items():
            if name.startswith("layers."):
                sizes[int(name.split(".")[1])] += size(name, shape)
        coming = [sizes[index] for index in _coming(count, slots)]
        return cls(slots, sum(coming), max(coming) * min(2, slots))


def reading_anew(weights: Weights, device: torch.device, dtype: torch.dtype) -> Get:
    """Return what reads a weight whenever it is asked for it, but for those of layers that are no matrices."""
    small: dict[str, Tensor] = {}

    def get(name: str) -> Tensor:
        if name in small:
            return small[name]
        tensor = read(weights, name, device, dtype)
        if name.startswith("layers.") and not is_matrix(name):
            small[name] = tensor = tensor.clone()
        return tensor

    return get


@dataclass(slots=True)
class _Slot:
    """Where a layer lies, what it was read into on its way there, and the mark behind the last copy from that."""

    arena: Arena
    staging: Arena
    copied: Mark | None = None


class LayerStream:
    """A decoder's layers in fewer slots than there are layers, see `StreamPlan`.

    While one layer computes, the next is brought in; with a single slot nothing is brought in ahead. To a CUDA device
    layers are copied on a stream of their own, from pinned memory, so that neither thread waits for the device: before
    a layer comes, its slot's last one has been computed with, and before it computes, it has been copied.

    Args:
        make: makes a layer by its number, of weights; it is called on another thread too.
        load: what weights there are, to be read again and again.
        count: of layers.
        slots: how many can be there at once, 1 to count - 1.
        device: where they are.
        lane: where they are copied, if they can be on their way while others compute.
    """

    def __init__(
        self,
        make: Callable[[Load, int], Any],
        load: Load,
        count: int,
        slots: int,
        device: torch.device,
        lane: Lane | None = None,
    ) -> None:
        self._make, self._load, self._count, self._order = make, load, count, _coming(count, slots)
        self._changes: list[Callable[[nn.Module], object]] = []
        self._turns, self._lane, self._waited = min(2, slots), lane, 0.0
        stagings = [Arena(torch.device("cpu"), pinned=device.type == "cuda") for _ in range(self._turns)]
        if lane is None:  # a staging is free as soon as its layer is made
            stagings = stagings[:1] * self._turns
        self._slots = cycle([_Slot(Arena(device), staging) for staging in stagings])
        self._ahead: deque[tuple[int, Future[tuple[Any, Mark | None]]]] = deque()
        self._thread = ThreadPoolExecutor(1, "layers", compute_alone)

    def modules(self) -> Iterator[nn.Module]:
        """Yield what computes each layer: itself, if it stays."""
        for index in range(self._count):
            yield _Streamed(self, index) if index in self._order else self.layer(index)

    def layer(self, index: int) -> Any:
        """Return a layer that has memory of its own."""
        with torch.no_grad(), copied():
            layer = self._make(self._load, index)
        for change in self._changes:
            change(layer)
        return layer

    def take(self, index: int) -> Any:
        """Return a layer once it is there; meanwhile the next one is brought in, if there is a slot."""
        if not self._ahead or self._ahead[0][0] != index:
            self._restart(index)
        began, reached = perf_counter(), None if self._lane is None else self._lane.computed()
        layer, copied = self._ahead.popleft()[1].result()
        if self._lane is not None and reached is not None and copied is not None:
            self._lane.compute_after(copied, reached)
            for weight in layer.parameters():
                self._lane.uses(weight)
        else:
            self._waited += perf_counter() - began
        return layer

    def release(self) -> None:
        """Hear that a layer that was taken is gone: another comes in its slot."""
        self._read_on()

    def waited(self) -> float:
        """Return for how many seconds steps have waited for layers since this was last asked."""
        waited, self._waited = self._waited if self._lane is None else self._lane.waited(), 0.0
        return waited

    def change(self, change: Callable[[nn.Module], object]) -> None:
        """Do something to every layer that is brought in from now on."""
        self._changes.append(change)
        self._forget()

    def close(self) -> None:
        """Let all go."""
        self._forget()
        self._thread.shutdown()

    def _read_on(self) -> None:
        """Bring in what comes next, until no slot is left; what computed in a free slot was started before this."""
        computed = None if self._lane is None else self._lane.computed()
        while len(self._ahead) < self._turns:
            index = next(self._coming)
            self._ahead.append((index, self._thread.submit(self._bring_in, index, next(self._slots), computed)))

    def _restart(self, index: int) -> None:
        """Begin again with a layer, wherever the last step has stopped."""
        self._forget()
        at = self._order.index(index)
        self._coming = cycle(self._order[at:] + self._order[:at])
        self._read_on()

    def _forget(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        wait(future for _, future in self._ahead)
        self._ahead.clear()

    def _bring_in(self, index: int, slot: _Slot, computed: Mark | None) -> tuple[Any, Mark | None]:
        """Return a layer that lies in a slot, and the mark behind which it is there; its parts are only lent."""
        if slot.copied is not None:
            slot.copied.synchronize()
        slot.staging.clear()
        load = replace(self._load, get=self._load.again or self._load.get, join=slot.arena.join)
        lane = nullcontext() if self._lane is None else self._lane.copying(computed)
        with torch.no_grad(), copied(slot.staging.empty), lane:
            slot.arena.clear()
            layer = self._make(load, index)
            for change in self._changes:
                change(layer)
            slot.copied = None if self._lane is None else self._lane.copied()
        return layer, slot.copied


class _Streamed(nn.Module):
    """A layer that is there while it computes."""

    def __init__(self, stream: LayerStream, index: int) -> None:
        super().__init__()
        self._stream, self._index = stream, index

    def forward(self, *arguments: Any) -> Tensor:
        """See `decoder.Layer`."""
        layer = self._stream.take(self._index)
        try:
            out: Tensor = layer(*arguments)
        finally:
            del layer
            self._stream.release()
        return out

    def parts(self, hidden: int) -> Iterator[Any]:
        """See `decoder.Layer`; what it yields stays there for as long as it is held."""
        yield from self._stream.layer(self._index).parts(hidden)
