"""Experts as a CUDA device computes them, without the host knowing who was chosen, are those of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import PROMPT, STEPS, TOLERANCE, Case, difference
from test_codes import runner_of
from torch import Tensor

from xinfer.backends.torch.mlp import Experts
from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper, cut

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]  # plain, with biases, with groups and shared ones


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def computing(experts: Experts, x: Tensor) -> object:
        return experts._of_one_token if x.shape[0] == 1 else experts._grouped

    monkeypatch.setattr(Experts, "_computing", computing)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, shape(family, next(iter(SHAPES[family]))), write=write_reference, max_len=PROMPT + STEPS)
    found = parity(case.ours(), case.reference(), case.prompt(), STEPS, cut(PROMPT, np.random.default_rng(1)))
    assert found.difference <= TOLERANCE
    assert found.first_other_token is None


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_ones_are_those_that_codes_stand_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, shape("gpt_oss", next(iter(SHAPES["gpt_oss"]))), write=write_reference, max_len=64)
    ours = Stepper(runner_of(case, kind)).greedy(case.prompt(24), [20, 3, 1], 6)
    monkeypatch.undo()
    theirs = Stepper(runner_of(case, kind, rounded=True)).greedy(case.prompt(24), [24], 6)
    assert difference(ours[1], theirs[1]) <= TOLERANCE
    assert ours[0] == theirs[0]


def test_a_graph_of_them_can_be_made_of_any_number_of_tokens(tmp_path: Path) -> None:
    case = Case(tmp_path, shape("qwen3_moe", next(iter(SHAPES["qwen3_moe"]))), write=write_reference)
    experts = case.ours("bfloat16").runner.model.layers[-1].mlp  # type: ignore[attr-defined]
    x = torch.randn(5, experts.up.weight.shape[2], dtype=torch.bfloat16)
    exported = torch.export.export(experts, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},)).module()
    for tokens in (2, 3, 40):
        x = torch.randn(tokens, x.shape[1], dtype=torch.bfloat16)
        assert torch.equal(exported(x), experts(x))
