"""Weights that are sent to a device again and again are the same each time, and stay on the host as far as they may."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.backends.torch.codes import Codes
from xinfer.backends.torch.pinned import sending
from xinfer.models.quantize import Scheme, quantize

HOST = torch.device("cpu")
SCHEME = Scheme(bits=4, block=32, symmetric=False, method="rtn", wide_bits=4)


def codes(rows: int) -> Codes:
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    return Codes.of(quantize(weight, SCHEME), weight.shape)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Codes):
        return torch.equal(one.weights(), other.weights())
    return torch.equal(one, other)


@given(rows=st.lists(st.integers(1, 20), min_size=1, max_size=8), share=st.floats(0, 1), data=st.data())
def test_what_finds_room_is_read_once_and_everything_else_each_time(
    rows: list[int], share: float, data: st.DataObject
) -> None:
    made = {
        f"layers.{i}.q.weight": codes(count) if data.draw(st.booleans()) else torch.randn(count, 8)
        for i, count in enumerate(rows)
    }
    norm, room = torch.randn(5), int(share * sum(each.nbytes for each in made.values()))
    read: Counter[str] = Counter()
    pinned: list[torch.Tensor] = []

    def load(name: str) -> Any:
        read[name] += 1
        return made[name]

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    get = sending({"layers.0.attn_norm.weight": norm}.__getitem__, load, HOST, room, pin)
    for _ in range(3):
        assert get("layers.0.attn_norm.weight") is norm
        for name, expected in made.items():
            assert same(get(name), expected)
    assert sum(each.nbytes for each in pinned) <= room
    once = [name for name, times in read.items() if times == 1]
    assert sum(made[name].nbytes for name in once) == sum(each.nbytes for each in pinned)
    assert all(made[name].nbytes > room - sum(each.nbytes for each in pinned) for name in made if name not in once)
    assert all(times in (1, 3) for times in read.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("backend.pinned_memory=0.5",), "is for layers that come to a CUDA device from the host, and none do"),
        (("backend.pinned_memory=1e9", "--stream-layers=2"), "leave it out (0), or take model.stream_layers"),
    ],
)
def test_memory_that_nothing_would_use_is_refused(
    say: Any, words: tuple[str, ...], message: str, tiny_llama: Any
) -> None:
    code, _, errors = say("--model", str(tiny_llama), *words)
    assert code == 2
    assert message in errors
