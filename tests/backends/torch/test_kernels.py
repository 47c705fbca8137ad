"""The operators in C++ compute what a formula in float64 says; without a compiler everything works as before."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xinfer.backends.torch.kernels import available, compiler
from xinfer.backends.torch.linear import Linear

BLOCK, BLOCKS = 16, 240

needs_operators = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


def formula(
    q: Tensor, pool: Tensor, starts: list[int], contexts: list[int], tables: Tensor, sinks: Tensor | None, shape: dict
) -> Tensor:
    """Attention sequence by sequence, all scores at once, in float64."""
    block = shape.get("block", BLOCK)
    heads, groups, dim, value_dim = q.shape[1], shape["groups"], q.shape[2], shape["value_dim"]
    rows = []
    for s, context in enumerate(contexts):
        places = torch.arange(context)
        entries = pool[tables[s].long()[places // block] * block + places % block].double()
        queries = q[starts[s] : starts[s + 1]].double()
        k = entries[:, : groups * dim].view(context, groups, dim)
        v = k[..., :value_dim] if shape["latent"] else entries[:, groups * dim :].view(context, groups, value_dim)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        scores = torch.einsum("mhd,nhd->hmn", queries, k) * shape["scale"]
        if shape["softcap"]:
            scores = torch.tanh(scores / shape["softcap"]) * shape["softcap"]
        last = torch.arange(context - len(queries), context)[:, None]
        seen = places <= last
        if shape["window"]:
            seen &= places > last - shape["window"]
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(queries), 1)], 2)
        weights = scores.softmax(2)[..., :context]
        rows.append(torch.einsum("hmn,nhd->mhd", weights, v).flatten(1))
    return torch.cat(rows)


@needs_operators
@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 300)), min_size=1, max_size=6),
    heads=st.sampled_from([(9, 3), (4, 1), (6, 2), (5, 5), (70, 1)]),
    dims=st.sampled_from([(64, 64), (24, 16), (20, 12), (128, 128), (7, 7)]),
    latent=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 7, 100]),
    sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    single=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_of_any_sequences_is_the_formulas(
    work: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    latent: bool,
    softcap: float,
    window: int,
    sinks: bool,
    dtype: torch.dtype,
    single: bool,
    seed: int,
) -> None:
    assert available()
    generator = torch.Generator().manual_seed(seed)
    counts = [1 if single else count for count, _ in work]
    contexts = [count + before for count, (_, before) in zip(counts, work, strict=True)]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    tables = torch.randperm(BLOCKS - 1, generator=generator)[: 6 * 30].view(6, 30)[: len(work)].int()
    width = heads[1] * (dims[0] if latent else sum(dims))
    pool = torch.full((BLOCKS * BLOCK, width), math.nan, dtype=dtype)  # case N02: what nobody has written is rubbish
    for table, context in zip(tables, contexts, strict=True):
        places = torch.arange(context)
        slots = table.long()[places // BLOCK] * BLOCK + places % BLOCK
        pool[slots] = torch.randn(context, width, generator=generator).to(dtype)
    q = torch.randn(starts[-1], heads[0], dims[0], generator=generator).to(dtype)
    own = torch.randn(heads[0], generator=generator) if sinks else None
    shape = {"groups": heads[1], "value_dim": dims[1], "latent": latent, "scale": dims[0] ** -0.5}
    shape |= {"softcap": softcap, "window": window}
    theirs = formula(q, pool, starts, contexts, tables, own, shape)
    ours = torch.ops.xinfer.attention(
        *(q, pool, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32), tables, own),
        *(BLOCK, heads[1], dims[1], latent, shape["scale"], softcap, window),
    )
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert float((ours.double() - theirs).abs().max()) <= bound * (1 + float(theirs.abs().max()))


@needs_operators
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 70), st.sampled_from([88, 89, 530])),
    out=st.integers(1, 90),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_are_the_formulas_in_any_number_of_rows(
    rows: int, out: int, columns: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, added = (
        torch.randn(*dims, generator=generator).to(dtype) for dims in ((rows, columns), (out, columns), (out,))
    )
    around = torch.full((weight.numel() + 128,), math.nan, dtype=dtype)  # what lies there is not the matrix's
    around[64:-64] = weight.flatten()
    module = Linear(around[64:-64].view(weight.shape), added if bias else None)
    theirs = x.double() @ weight.double().T + (added.double() if bias else 0)
    scale = float((x.double().abs() @ weight.double().abs().T).max()) + 5
    for few in (0, 64):
        module.few = few
        bound = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        assert float((module(x).double() - theirs).abs().max()) <= bound * scale


@needs_operators
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 70),
    heads=st.sampled_from([(9, 3), (4, 1), (2, 2)]),
    dims=st.sampled_from([(64, 64), (64, 32), (64, 20), (18, 18), (7, 4)]),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_queries_are_turned_and_keys_and_values_lie_where_they_belong(
    tokens: int, heads: tuple[int, int], dims: tuple[int, int], interleaved: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    (queries, groups), (dim, width) = heads, dims
    qkv = torch.randn(tokens, queries + 2 * groups, dim, generator=generator).to(dtype)
    cos, sin = (torch.randn(tokens, 1, width, generator=generator).to(dtype) for _ in range(2))
    slots = torch.randperm(100, generator=generator)[:tokens]
    pool = torch.full((100, 2 * groups * dim), math.nan, dtype=dtype)
    q = torch.ops.xinfer.rotate_and_store(qkv, cos, sin, slots, pool, groups, interleaved)
    exact = qkv.double()
    places = torch.arange(width)
    partner = places ^ 1 if interleaved else (places + width // 2) % width
    exact[..., :width] = exact[..., :width] * cos.double() + exact[..., partner] * sin.double()
    keys, values = pool[slots].view(tokens, 2, groups, dim).unbind(1)
    bound = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    assert torch.allclose(q.double(), exact[:, :queries], rtol=bound, atol=bound)
    assert torch.allclose(keys.double(), exact[:, queries : queries + groups], rtol=bound, atol=bound)
    assert torch.equal(values, qkv[:, queries + groups :])
    others = torch.ones(100, dtype=torch.bool).index_fill_(0, slots, value=False)
    assert pool[others].isnan().all()


@needs_operators
def test_a_slot_beyond_the_cache_is_refused() -> None:
    assert available()
    qkv, turn, pool = torch.ones(1, 3, 8), torch.ones(1, 1, 8), torch.zeros(4, 16)
    with pytest.raises(IndexError, match="slot 4 of 4"):
        torch.ops.xinfer.rotate_and_store(qkv, turn, turn, torch.tensor([4]), pool, 1, False)


def test_without_a_compiler_eager_says_so_and_computes_the_same(xinfer, tiny_llama: Path, tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "CXX": "", "XINFER_CACHE": str(tmp_path / "cache")}
    model = ("--model", str(tiny_llama), "sampling.ignore_eos=true")
    arguments = (*model, "--prompt", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12")
    reference = xinfer("backend=eager", *arguments)
    without = xinfer("backend=eager", *arguments, **nothing)
    assert without.returncode == 0, without.stderr
    assert without.stdout == reference.stdout != ""
    assert "there is no C++ compiler" in without.stderr
    compiled = xinfer("backend=compile", *arguments, **nothing)
    assert compiled.returncode == 2
    assert "backend=compile needs Linux and a C++ compiler (g++ or clang++): install one" in compiled.stderr
