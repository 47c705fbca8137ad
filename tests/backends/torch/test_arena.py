"""An arena's tensors don't overlap, hold what is joined in them, and need no new memory once it is known how much."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.backends.torch.arena import Arena
from xinfer.backends.torch.load import cat

CPU = torch.device("cpu")
TYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])


@given(rounds=st.lists(st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=3), TYPES)), max_size=4))
def test_tensors_of_a_round_keep_what_is_written_to_them(rounds: list[list[tuple[list[int], torch.dtype]]]) -> None:
    arena = Arena(CPU)
    for wanted in [*rounds, *rounds[-1:]]:
        arena.clear()
        before = arena._bytes.data_ptr()
        tensors = [arena.empty(shape, dtype) for shape, dtype in wanted]
        for index, (tensor, (shape, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
            assert list(tensor.shape) == shape and tensor.dtype is dtype and tensor.is_contiguous()
            tensor.fill_(index + 1)
        for index, tensor in enumerate(tensors):
            assert bool((tensor == index + 1).all())
    if rounds:  # the last round came twice: the second time there was room
        end = before + len(arena._bytes)
        assert all(before <= tensor.data_ptr() < end for tensor in tensors if tensor.numel())


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=4), dim=st.integers(0, 2), dtype=TYPES)
def test_what_is_joined_is_a_copy_of_what_torch_joins(counts: list[int], dim: int, dtype: torch.dtype) -> None:
    arena = Arena(CPU)
    for _ in range(2):
        arena.clear()
        parts = [torch.randint(0, 99, [count if axis == dim else 3 for axis in range(3)]).to(dtype) for count in counts]
        joined, expected = arena.join(parts, dim), cat(parts, dim).clone()
        assert torch.equal(joined, expected)
        for part in parts:
            part.zero_()
        assert torch.equal(joined, expected)
