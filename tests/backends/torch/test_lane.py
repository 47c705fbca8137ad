"""Layers that are copied on a stream of their own: whatever either stream does next, neither overtakes the other.

There is no device here. So a stand-in for the lane keeps, for each of the two streams and for the host, how far it
knows the others to be: a stream knows of another what the marks that it has waited for say, and nothing else.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from xinfer.backends.torch.load import Load, cat
from xinfer.backends.torch.streaming import LayerStream
from xinfer.models.mapped_file import _copied


class Place(NamedTuple):
    """A mark: so far a stream was told to go, and all that it knew there of the other."""

    lane: "Streams"
    stream: str
    started: Counter[str]

    def synchronize(self) -> None:
        self.lane.known["host"] |= self.started


class Streams:
    """Stands in for `Lane`: `known[a][b]` is how many things stream b has done that a knows to be done."""

    def __init__(self) -> None:
        self.known: dict[str, Counter[str]] = {each: Counter() for each in ("computing", "lane", "host")}
        self.used: list[nn.Parameter] = []

    def start(self, stream: str) -> int:
        """Return the number of what a stream is told to do next."""
        self.known[stream][stream] += 1
        return self.known[stream][stream]

    def computed(self) -> Place:
        return Place(self, "computing", Counter(self.known["computing"]))

    def copied(self) -> Place:
        return Place(self, "lane", Counter(self.known["lane"]))

    def compute_after(self, copied: Place, reached: Place) -> None:
        assert (copied.stream, reached.stream) == ("lane", "computing")
        self.known["computing"] |= copied.started

    def uses(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        self.used.append(weight)

    @contextmanager
    def copying(self, after: Place | None) -> Iterator[None]:
        if after is not None:
            self.known["lane"] |= after.started
        yield

    def waited(self) -> float:
        return 7.0


class Reading:
    """Makes layers whose copies and computing are only started, and remembers the last one of each in each place."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.computing: Counter[int] = Counter()  # by slot
        self.copying: Counter[int] = Counter()  # by what is copied from

    def __call__(self, load: Load, index: int) -> "Layer":
        if load.join is cat:  # one that stays
            return Layer(self, 0, index, 0)
        slot, staging = (id(each.__self__) for each in (load.join, _copied.get()))  # type: ignore[union-attr]
        assert self.streams.known["lane"]["computing"] >= self.computing[slot], "it would overwrite what computes"
        assert self.streams.known["host"]["lane"] >= self.copying[staging], "it would overwrite what is copied from"
        self.copying[staging] = copied = self.streams.start("lane")
        return Layer(self, slot, index, copied)


class Layer(nn.Module):
    def __init__(self, reading: Reading, slot: int, index: int, copied: int) -> None:
        super().__init__()
        self.reading, self.slot, self.index, self.copied = reading, slot, index, copied
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, seen: list[int]) -> list[int]:
        streams = self.reading.streams
        if self.slot:
            assert streams.known["computing"]["lane"] >= self.copied, "it would compute before all is there"
            assert any(self.weight is each for each in streams.used), "its memory could be another's too early"
        self.reading.computing[self.slot] = streams.start("computing")
        return [*seen, self.index]


@given(count=st.integers(2, 9), data=st.data())
def test_nothing_is_overwritten_that_is_in_use_and_nothing_used_that_is_not_there(count: int, data: Any) -> None:
    streams, slots = Streams(), data.draw(st.integers(1, count - 1))
    load = Load(lambda name: None)
    stream = LayerStream(Reading(streams), load, count, slots, torch.device("cpu"), streams)  # type: ignore[arg-type]
    layers = list(stream.modules())
    for _ in range(4):
        seen: list[int] = []
        stop = data.draw(st.integers(1, count))  # where a step breaks off
        for layer in layers[:stop]:
            seen = layer(seen)
        assert seen == list(range(stop))
    assert stream.waited() == 7
    stream.close()


@pytest.mark.parametrize("forgotten", ["copying", "compute_after", "uses", "synchronize"])
def test_that_notices_whatever_is_left_out(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Any:
        return nullcontext()

    monkeypatch.setattr(Place if forgotten == "synchronize" else Streams, forgotten, nothing)
    with pytest.raises(AssertionError, match=r"it would|its memory"):
        test_nothing_is_overwritten_that_is_in_use_and_nothing_used_that_is_not_there()
