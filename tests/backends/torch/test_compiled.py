"""Compiled steps compute what transformers and eager compute, and are never compiled again."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT, SEED, STEPS, TOLERANCE, Case, difference, expected, in_company

from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import cut

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
