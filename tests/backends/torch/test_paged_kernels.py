"""Every kernel for paged caches computes what a formula in float64 says, of any sequences in any blocks."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import TOLERANCE, Case, difference, expected, in_company
from contracts import flex_contract, varlen_contract
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import formula
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.nn.attention.flex_attention import flex_attention

from xinfer.backends.torch import flex, runner, varlen
from xinfer.backends.torch.choosing import Choice
from xinfer.backends.torch.paged import Kernel, PagedStep, begun_blocks, plan_paged
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec, LatentSpec, NormSpec
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape

CPU = torch.device("cpu")
BLOCKS: dict[Kernel, int] = {"sdpa": 16, "flex": 32, "varlen": 256}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module", autouse=True)
def kernels_for_cuda():
    """Have torch's kernels be what they promise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", varlen_contract)
        patch.setattr(flex, "_compiled", lambda: flex_contract)
        yield


def batch_of(work: list[tuple[int, int]], block_size: int, shared: int, seed: int) -> Batch:
    """Return sequences of (new tokens, tokens before them) in blocks of random order, some more than there need be.

    All that have `shared` tokens before their new ones have these in the same blocks.
    """
    counts = np.array([count for count, _ in work], np.int32)
    contexts = np.array([count + before for count, before in work], np.int32)
    width = int(-(-contexts.max() // block_size)) + 1
    tables = np.random.default_rng(seed).permutation(len(work) * width + 2)[: len(work) * width].reshape(-1, width)
    whole = shared // block_size
    for s, (_, before) in enumerate(work):
        if min(before, work[0][1]) >= whole * block_size:
            tables[s, :whole] = tables[0, :whole]
        tables[s, -(-contexts[s] // block_size) :] = -1
    owner = np.repeat(np.arange(len(work)), counts)
    places = np.concatenate([np.arange(before, before + count) for count, before in work])
    ends = np.cumsum(counts, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(len(places), np.int32),
        positions=places.astype(np.int32),
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=contexts,
        block_tables=tables.astype(np.int32),
        slot_mapping=tables[owner, places // block_size].astype(np.int64) * block_size + places % block_size,
        sample_at=ends - 1,
        adapters=np.zeros(len(work), np.int32),
    )


def pool_of(batch: Batch, spec: AttentionSpec, block_size: int, generator: torch.Generator, rest: float) -> Tensor:
    """Return a cache [slots, width] of what is no number, but for the sequences' tokens, and `rest` in their blocks."""
    blocks = max(batch.block_tables.shape[1], int(batch.block_tables.max()) + 2)
    pool = torch.full((blocks, block_size, spec.cache_width), math.nan)
    pool[torch.from_numpy(np.unique(batch.block_tables[batch.block_tables >= 0]).astype(np.int64))] = rest
    pool = pool.view(-1, spec.cache_width)
    for table, context in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        places = np.arange(context)
        slots = torch.from_numpy(table[places // block_size].astype(np.int64) * block_size + places % block_size)
        pool[slots] = torch.randn(context, spec.cache_width, generator=generator)
    return pool


def check(
    kernel: Kernel, batch: Batch, spec: AttentionSpec, dtype: torch.dtype, seed: int, block_size: int | None = None
) -> None:
    """Compare what a step's attention is with the formula."""
    size, generator = block_size or BLOCKS[kernel], torch.Generator().manual_seed(seed)
    # The runner clears a block when its first token comes, for flex_attention multiplies the rest by zero.
    pool = pool_of(batch, spec, size, generator, 0.0 if kernel == "flex" else math.nan).to(dtype)
    q = torch.randn(len(batch.token_ids), spec.heads, spec.head_dim, generator=generator).to(dtype)
    sinks = torch.randn(spec.heads, generator=generator) if spec.sinks else None
    step = plan_paged(batch, size, CPU, {spec: kernel})
    with torch.inference_mode():
        ours = step.attend(q, q, pool, spec, sinks)
    kind = {"groups": spec.kv_heads, "value_dim": spec.value_dim, "latent": spec.latent is not None}
    kind |= {"scale": spec.scale, "softcap": spec.softcap, "window": spec.window, "block": size}
    tables = torch.from_numpy(batch.block_tables)
    theirs = formula(q, pool, batch.query_starts.tolist(), batch.context_lens.tolist(), tables, sinks, kind)
    assert ours.dtype == dtype
    assert float((ours.double() - theirs).abs().max()) <= BOUNDS[dtype] * (1 + float(theirs.abs().max()))


WORK = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 300)), min_size=1, max_size=5)
HEADS = st.sampled_from([(6, 2), (9, 3), (4, 4), (5, 1)])
WINDOWS, SEEDS = st.sampled_from([None, 1, 7, 40, 100]), st.integers(0, 1000)


def sequences(work: list[tuple[int, int]], single: bool, kernel: Kernel, shared: int, seed: int) -> Batch:
    return batch_of([(1 if single else count, before) for count, before in work], BLOCKS[kernel], shared, seed)


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@settings(max_examples=40)
@given(
    work=WORK,
    heads=HEADS,
    window=WINDOWS,
    softcap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(BOUNDS)),
    single=st.booleans(),
    shared=st.sampled_from([0, 64, 200]),
    seed=SEEDS,
)
def test_attention_of_any_sequences_is_the_formulas(kernel: Kernel, **drawn: Any) -> None:
    heads, groups = drawn["heads"]
    spec = AttentionSpec(heads, groups, 16, window=drawn["window"], softcap=drawn["softcap"], sinks=drawn["sinks"])
    batch = sequences(drawn["work"], drawn["single"], kernel, drawn["shared"], drawn["seed"])
    check(kernel, batch, spec, drawn["dtype"], drawn["seed"])


@settings(max_examples=40)
@given(
    work=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 600)), min_size=1, max_size=4),
    heads=HEADS,
    window=WINDOWS,
    sinks=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    single=st.booleans(),
    seed=SEEDS,
)
def test_flash_attention_is_asked_for_the_formulas_attention(**drawn: Any) -> None:
    heads, groups = drawn["heads"]
    spec = AttentionSpec(heads, groups, 16, window=drawn["window"], sinks=drawn["sinks"])
    batch = sequences(drawn["work"], drawn["single"], "varlen", 300, drawn["seed"])
    check("varlen", batch, spec, drawn["dtype"], drawn["seed"])


@pytest.mark.parametrize("single", [True, False])
def test_latent_attention_gathers(single: bool) -> None:
    latent = LatentSpec(rank=24, q_rank=None, nope_dim=16, rope_dim=8, value_dim=16, norm=NormSpec(1e-6))
    spec = AttentionSpec(8, 1, 32, latent=latent, scaling=0.2)
    check("sdpa", sequences([(1, 40), (7, 0), (30, 61)], single, "sdpa", 0, 0), spec, torch.float32, 0)


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("window", [None, 20])
def test_places_without_a_sequence_change_nothing(count: int, window: int | None) -> None:
    """A graph for several sequences gets an empty one beside a single one."""
    spec = AttentionSpec(6, 2, 16, window=window)
    whole = batch_of([(count, 30)], 256, 0, 0)
    padded = replace(
        whole,
        query_starts=np.append(whole.query_starts, np.int32(count)),
        context_lens=np.append(whole.context_lens, np.int32(0)),
        block_tables=np.concatenate([whole.block_tables, np.zeros_like(whole.block_tables)]),
    )
    for kernel in BLOCKS:
        check(kernel, padded, spec, torch.float16, 0, 256)


class Attending(nn.Module):
    """A step's attention as a function of tensors alone, as graphs have it."""

    def __init__(self, spec: AttentionSpec, kernel: Kernel, block_size: int) -> None:
        super().__init__()
        self.spec, self.kernel, self.block_size = spec, kernel, block_size

    def forward(
        self, q: Tensor, pool: Tensor, starts: Tensor, contexts: Tensor, tables: Tensor, host: Tensor
    ) -> Tensor:
        kernels: dict[AttentionSpec, Kernel] = {self.spec: self.kernel}
        step = PagedStep(starts, None, 0, starts, contexts, tables, self.block_size, host, False, kernels)
        return step.attend(q, q, pool, self.spec)


def arguments(step: PagedStep, spec: AttentionSpec, tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, spec.heads, spec.head_dim, generator=generator).half()
    pool = torch.randn(20 * step.block_size, spec.cache_width, generator=generator).half()
    return q, pool, step.query_starts, step.context_lens, step.block_tables, step.host


@pytest.mark.parametrize("kernel", BLOCKS)
def test_one_graph_serves_steps_of_other_shapes(kernel: Kernel) -> None:
    spec, size = AttentionSpec(6, 2, 16, window=40), BLOCKS[kernel]
    eager = Attending(spec, kernel, size)
    tokens, rows, blocks = (Dim(name, min=2) for name in ("tokens", "rows", "blocks"))
    dims = ({0: tokens}, None, {0: rows + 1}, {0: rows}, {0: rows, 1: blocks}, {0: 2 * rows + 3})
    traced = None
    for work in ([(3, 20), (5, 0)], [(70, 5), (1, 33), (1, 2)]):
        batch = batch_of(work, size, 0, 1)
        given_ = arguments(plan_paged(batch, size, CPU, {spec: kernel}), spec, len(batch.token_ids))
        with torch.no_grad():
            traced = traced or torch.export.export(eager, given_, dynamic_shapes=dims).module()
            torch.testing.assert_close(traced(*given_), eager(*given_))


def test_planning_never_waits_for_the_device() -> None:
    """Tensors without numbers would raise where the host looked at one."""
    with FakeTensorMode():
        numbers = [torch.zeros(shape, dtype=torch.int32) for shape in ((4,), (3,), (3, 5))]
        assert len(flex.tiles(*numbers, 40, 8, 16, 32, 30)) == 9
        assert varlen.key_starts(numbers[2], 256).shape == (4,)


def test_blocks_begin_with_their_first_token() -> None:
    batch = batch_of([(33, 31), (1, 64), (1, 65)], 32, 0, 0)
    tables = batch.block_tables
    assert begun_blocks(batch, 32).tolist() == [tables[0, 1], tables[1, 2]]


FAMILIES = [
    ("llama", "flex", "float32"),
    ("gemma2", "flex", "float32"),
    ("gpt_oss", "flex", "float32"),
    ("gpt_oss", "sdpa", "float32"),
    ("deepseek_v3", "sdpa", "float32"),
    ("qwen3", "varlen", "float16"),
    ("gpt_oss", "varlen", "float16"),
]


@pytest.mark.parametrize(("family", "kernel", "dtype"), FAMILIES)
def test_whole_models_compute_what_transformers_computes(
    family: str, kernel: Kernel, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that share steps, chunk by chunk and token by token, in blocks full of what is no number."""
    case = Case(tmp_path, shape(family, next(iter(SHAPES[family]))), write=write_reference)

    def forced(spec: Any, *rest: Any) -> dict[AttentionSpec, Choice]:
        return {layer.attention: Choice(kernel, ("another: not here",)) for layer in spec.layers}

    reference, usual = case.reference(), case.ours(dtype)
    monkeypatch.setattr(runner, "choose_kernels", forced)
    ours = case.ours(dtype)
    assert ours.runner.info.block_size == {"sdpa": 16, "flex": 128, "varlen": 256}[kernel]
    assert ours.runner.info.notes == (f"attention is computed by {Choice(kernel)} (another: not here)",)
    assert ours.runner.metrics()["paged_attention_ratio"] == (kernel != "sdpa")
    for (sequence, logits), (_, near) in zip(in_company(ours, case), in_company(usual, case), strict=True):
        theirs = expected(reference, sequence.token_ids[: sequence.num_computed])
        bound = TOLERANCE if dtype == "float32" else 2 * difference(near, theirs)
        assert difference(logits, theirs) <= bound


@pytest.mark.parametrize("spec", [AttentionSpec(6, 2, 16, window=40, softcap=3.0, sinks=True), AttentionSpec(4, 4, 16)])
def test_after_warming_up_no_step_compiles_anything(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    pool = torch.zeros(40 * 32, spec.cache_width)
    with torch.inference_mode():
        flex.warm_up(spec, pool, torch.float32, 32)
        with torch.compiler.set_stance("fail_on_recompile"):
            for work in (
                [(1, 0)],
                [(1, 200)],
                [(1, 3)] * 7,
                [(5, 0)],
                [(70, 100), (1, 1)],
                [(33, 2), (1, 90), (64, 0)],
            ):
                batch = batch_of(work, 32, 0, 0)
                q = torch.zeros(len(batch.token_ids), spec.heads, spec.head_dim)
                step = plan_paged(batch, 32, CPU, {spec: "flex"})
                step.attend(q, q, pool, spec, q[0, :, 0] if spec.sinks else None)


@pytest.mark.slow  # eight kernels are compiled
@pytest.mark.parametrize("kind", [{}, {"window": 7, "softcap": 3.0}], ids=["plain", "window and cap"])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("shared", [1, 3])
def test_flex_attention_itself_keeps_its_contract(
    kind: dict[str, Any], single: bool, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it takes no lists that are shorter than the pool, and no sums."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    batch = sequences([(40, 3), (1, 100), (5, 30)], single, "flex", 0, 0)
    missing = int(batch.block_tables.max()) + 2 - batch.block_tables.shape[1]
    wide = replace(batch, block_tables=np.pad(batch.block_tables, ((0, 0), (0, missing)), constant_values=-1))
    check("flex", wide, AttentionSpec(2 * shared, 2, 16, **kind), torch.float32, 0)
