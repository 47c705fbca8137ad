"""Compiled steps compute what transformers and eager compute, and are never compiled again."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT, SEED, STEPS, TOLERANCE, Case, difference, expected, in_company, model_of, spoil
from contracts import flex_contract, varlen_contract
from test_captured import Again
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.torch import CompileConfig, flex, varlen
from xinfer.backends.torch import runner as torch_runner
from xinfer.backends.torch.choosing import Choice
from xinfer.backends.torch.compiled import CompiledRunner
from xinfer.backends.torch.mlp import Experts
from xinfer.backends.torch.paged import Kernel
from xinfer.engine.types import Limits, Sequence
from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper, cut

LONGEST = PROMPT + STEPS
FEW = ["llama", "gemma2", "gpt_oss", "deepseek_v3"]  # capped, sinks and windows, experts, latent
ALL = [
    pytest.param(
        family, name, marks=() if family in FEW and name == names[0] else pytest.mark.slow, id=f"{family}-{name}"
    )
    for family, names in ((family, list(names)) for family, names in SHAPES.items())
    for name in names
]


@pytest.mark.parametrize(("family", "name"), ALL)
def test_tokens_and_logits_are_those_of_the_references(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, shape(family, name), write=write_reference, max_len=LONGEST)
    ours = case.ours(backend="compile")
    compiled: list[Any] = []
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *args, **kwargs: compiled.append(args))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    reference = case.reference()
    found = parity(ours, reference, case.prompt(), STEPS, cut(PROMPT, np.random.default_rng(1)))
    assert found.difference <= TOLERANCE
    assert found.first_other_token is None
    assert found.spread >= 1
    assert ours.greedy(case.prompt(), [PROMPT], STEPS)[0] == case.ours().greedy(case.prompt(), [PROMPT], STEPS)[0]
    for sequence, logits in in_company(ours, case):
        theirs = expected(reference, sequence.token_ids[: sequence.num_computed], LONGEST)
        assert difference(logits, theirs) <= TOLERANCE
    assert not compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize(
    ("family", "kernel", "dtype"),
    [
        ("llama", None, "float32"),
        pytest.param("llama", "sdpa", "float32", marks=pytest.mark.slow),
        pytest.param("gemma2", "flex", "float32", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "sdpa", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen3", "varlen", "float16", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "varlen", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_recorded_steps_are_eagers_and_nothing_is_compiled_after_they_were_recorded(
    family: str, kernel: Kernel | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel, that is the whole way of a CUDA device, but for what stands in for its kernels and its graphs."""
    case = Case(tmp_path, shape(family, SHAPES[family][0]), write=write_reference, max_len=LONGEST)
    usual, reference = case.ours(dtype), case.reference()
    if kernel is not None:
        as_on_a_device(kernel, monkeypatch)
    limits, record = Limits(max_model_len=LONGEST, max_num_seqs=8, kv_memory=64e6), Again()
    context = BackendContext(model_of(case.folder, dtype), CompileConfig(device="cpu"), limits)
    runner = CompiledRunner(context, record)
    spoil(runner)
    compiled: list[Any] = []
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *args, **kwargs: compiled.append(args))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ours, theirs = (errors(in_company(stepper, case), reference) for stepper in (Stepper(runner), usual))
    if dtype == "float32":
        assert max(ours) <= TOLERANCE
    else:  # where a router's choice may turn on the last digit, and then most of a row is another
        assert np.median(ours) <= 1.5 * np.median(theirs)
    Stepper(runner).greedy(case.prompt(), [PROMPT], STEPS)
    assert record.recorded == [8, 4, 2, 1]
    assert record.replays[1] >= STEPS
    assert sum(record.replays.values()) > STEPS, "several sequences never decoded together"
    assert not compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def errors(texts: list[tuple[Sequence, Tensor]], reference: Any) -> list[float]:
    """Return each row's largest difference from the reference's."""
    found: list[float] = []
    for sequence, logits in texts:
        exact = expected(reference, sequence.token_ids[: sequence.num_computed], LONGEST)
        found += (logits - exact).abs().nan_to_num(torch.inf).amax(1).tolist()
    return found


def as_on_a_device(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a runner on the CPU choose a kernel of CUDA's, and compute nothing by operators for CPUs."""

    def forced(spec: Any, *rest: Any) -> dict[Any, Choice]:
        return {layer.attention: Choice(kernel) for layer in spec.layers}

    monkeypatch.setattr(torch_runner, "choose_kernels", forced)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_contract)
    monkeypatch.setattr(flex, "_compiled", lambda: flex_contract)
    monkeypatch.setattr(Experts, "_computing", lambda self, x: self._of_one_token if x.shape[0] == 1 else self._grouped)


def test_a_graph_has_nothing_of_the_weights_that_it_was_compiled_with(tmp_path: Path) -> None:
    """Sinks of a few heads are so few numbers that torch would rather write them into its code."""
    for seed in (SEED, SEED + 1):
        root = tmp_path / str(seed)
        root.mkdir()
        config = shape("gpt_oss", next(iter(SHAPES["gpt_oss"])))
        case = Case(root, config, seed, write=write_reference, max_len=LONGEST)
        tokens, rows = case.ours(backend="compile").greedy(case.prompt(), [PROMPT], 4)
        theirs = expected(case.reference(), case.prompt() + tokens, LONGEST)
        assert difference(rows, theirs[: len(rows)]) <= TOLERANCE


def test_weights_are_given_back_with_the_runner(tmp_path: Path) -> None:
    """Of several made one after the other, as a program or a sweep may, each would leave a whole model behind."""
    runner = Case(tmp_path, shape("llama", SHAPES["llama"][0]), write=write_reference, max_len=LONGEST).ours(
        backend="compile"
    )
    runner.greedy([1, 2, 3], [3], 2)
    weights = list(runner.runner._graphs._weights.values())
    runner.runner.close()
    del runner
    gc.collect()
    assert {weight._use_count() for weight in weights} == {1}, "somebody besides this test holds a weight"
