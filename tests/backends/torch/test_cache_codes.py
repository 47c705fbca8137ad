"""`backend.kv_dtype`: a cache of codes, and what is computed with it, are what formulas in float64 say."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import BLOCK, BLOCKS, formula, needs_operators
from torch import Tensor

from xinfer.backends.torch import entries as cache_entries
from xinfer.backends.torch.entries import KV_DTYPES, decode_entries, encode_entries, entry_bytes
from xinfer.backends.torch.kernels import available
from xinfer.models.spec import AttentionSpec

# How far a number may be from what its code stands for, as a share of its head's largest: half of a step of 127, and
# half of the step between the two largest of fp8, 416 and 448. A number that is halfway may be either, hence the rest.
OFF = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}
ROUNDING = 1 + 1e-5


def drawn(rows: int, heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return entries [rows, 2 * heads * dim] of which each has a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, 2 * heads, 1, generator=generator).mul(2).exp()
    return (torch.randn(rows, 2 * heads, dim, generator=generator) * sizes).flatten(1).to(dtype)


@pytest.fixture(params=["operators", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to make codes."""
    if request.param == "torch":
        monkeypatch.setattr(cache_entries, "available", lambda: False)
    return str(request.param)


SHAPES = [(3, 64), (1, 7), (2, 20), (4, 128)]


@pytest.mark.parametrize("kept", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_comes_back_within_half_a_step_of_its_heads_largest(
    way: str, kept: torch.dtype, dtype: torch.dtype
) -> None:
    for heads, dim in SHAPES:
        given_entries = drawn(50, heads, dim, seed=dim, dtype=dtype)
        given_entries[7] = 0
        spec = AttentionSpec(heads, heads, dim)
        coded = encode_entries(given_entries, dim, kept)
        assert coded.shape[1] == entry_bytes(spec, kept) == (8 * heads + 2 * heads * dim + 3) // 4 * 4
        exact = given_entries.double().view(50, -1, dim)
        off = (decode_entries(coded, spec, torch.float64).view_as(exact) - exact).abs()
        assert bool((off <= OFF[kept] * exact.abs().amax(-1, keepdim=True) * ROUNDING).all())
        assert bool((decode_entries(coded, spec, torch.float32)[7] == 0).all())


@needs_operators
@pytest.mark.parametrize("kept", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operator_makes_the_same_bytes_as_torch(
    kept: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for heads, dim in SHAPES:
        numbers = drawn(200, heads, dim, seed=dim, dtype=dtype)
        numbers[3], numbers[4, ::2] = 0, 0
        by_operator = encode_entries(numbers, dim, kept)
        with monkeypatch.context() as patch:
            patch.setattr(cache_entries, "available", lambda: False)
            by_torch = encode_entries(numbers, dim, kept)
        assert torch.equal(by_operator.view(torch.uint8), by_torch.view(torch.uint8))


@pytest.mark.parametrize("kept", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_hidden(way: str, kept: torch.dtype, wrong: float) -> None:
    """All of its head becomes none, wherever it is, and nothing else does."""
    for place in range(16, 32):
        numbers = drawn(2, 2, 16, seed=1)
        numbers[1, place] = wrong
        back = decode_entries(encode_entries(numbers, 16, kept), AttentionSpec(2, 2, 16), torch.float32)
        heads = back.isfinite().view(2, 4, 16)
        assert not heads[1, 1].any()
        assert bool(heads[0].all()) and bool(heads[1, [0, 2, 3]].all())


@needs_operators
@settings(max_examples=60)
@given(
    work=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 300)), min_size=1, max_size=6),
    heads=st.sampled_from([(9, 3), (4, 1), (6, 2), (5, 5)]),
    dim=st.sampled_from([64, 24, 20, 128, 7]),
    softcap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 7, 100]),
    sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kept=st.sampled_from(list(KV_DTYPES.values())),
    single=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_to_codes_is_the_formulas_of_what_they_stand_for(
    work: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    softcap: float,
    window: int,
    sinks: bool,
    dtype: torch.dtype,
    kept: torch.dtype,
    single: bool,
    seed: int,
) -> None:
    assert available()
    generator = torch.Generator().manual_seed(seed)
    counts = [1 if single else count for count, _ in work]
    contexts = [count + before for count, (_, before) in zip(counts, work, strict=True)]
    starts = [0, *itertools.accumulate(counts)]
    tables = torch.randperm(BLOCKS - 1, generator=generator)[: 6 * 30].view(6, 30)[: len(work)].int()
    spec = AttentionSpec(*heads, dim)
    pool = torch.full((BLOCKS * BLOCK, entry_bytes(spec, kept)), -1, dtype=torch.int8).view(kept)  # scales are NaN
    exact = torch.full((BLOCKS * BLOCK, spec.cache_width), math.nan, dtype=torch.float64)
    for table, context in zip(tables, contexts, strict=True):
        places = torch.arange(context)
        slots = table.long()[places // BLOCK] * BLOCK + places % BLOCK
        numbers = torch.randn(context, 2 * heads[1], dim, generator=generator)
        numbers *= torch.rand(context, 2 * heads[1], 1, generator=generator) + 0.2
        pool[slots] = encode_entries(numbers.flatten(1), dim, kept)
        exact[slots] = decode_entries(pool[slots], spec, torch.float64)
    q = torch.randn(starts[-1], heads[0], dim, generator=generator).to(dtype)
    own = torch.randn(heads[0], generator=generator) if sinks else None
    shape = {"groups": heads[1], "value_dim": dim, "latent": False, "scale": spec.scale}
    shape |= {"softcap": softcap, "window": window}
    theirs = formula(q, exact, starts, contexts, tables, own, shape)
    ours = torch.ops.xinfer.attention(
        *(q, pool, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32), tables, own),
        *(BLOCK, heads[1], dim, False, spec.scale, softcap, window),
    )
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert float((ours.double() - theirs).abs().max()) <= bound * (1 + float(theirs.abs().max()))
