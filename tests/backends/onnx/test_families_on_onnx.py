"""Every family that the graph has nodes for computes what transformers computes, and says what eager says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import PROMPT, SEED, STEPS, TOLERANCE, Case, agrees, difference, expected, in_company
from drawn import CANCELLING, configs
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import cut

LONGEST = PROMPT + STEPS
ALL = [(family, name) for family, names in SHAPES.items() for name in names]
FIRST = [(family, names[0]) for family, names in SHAPES.items()]
SLICE = [pytest.param(*each, marks=() if each in FIRST else pytest.mark.slow, id="-".join(each)) for each in ALL]

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(family: str, name: str, root: Path) -> Case:
    case = Case(root, shape(family, name), SEED, write_reference, LONGEST)
    if reason := case.refusal("onnx"):
        pytest.skip(reason)
    return case


@pytest.mark.parametrize(("family", "name"), ALL, ids=["-".join(each) for each in ALL])
def test_logits_are_those_of_transformers_and_tokens_those_of_eager(family: str, name: str, tmp_path: Path) -> None:
    case = case_of(family, name, tmp_path)
    chunks = cut(PROMPT, np.random.default_rng(1))
    ours = case.ours(backend="onnx")
    found = parity(ours, case.reference(), case.prompt(), STEPS, chunks)
    assert found.difference <= TOLERANCE
    assert found.first_other_token is None
    assert found.spread >= 1
    assert ours.greedy(case.prompt(), [PROMPT], STEPS)[0] == case.ours().greedy(case.prompt(), [PROMPT], STEPS)[0]


@pytest.mark.parametrize(("family", "name"), SLICE)
def test_it_does_not_matter_who_shares_the_step(family: str, name: str, tmp_path: Path) -> None:
    case = case_of(family, name, tmp_path)
    reference = case.reference()
    for sequence, logits in in_company(case.ours(backend="onnx"), case):
        theirs = expected(reference, sequence.token_ids[: sequence.num_computed], LONGEST)
        assert difference(logits, theirs) <= TOLERANCE


def any_small_model_agrees(config: dict[str, Any], length: int, seed: int, root: Path) -> None:
    case = Case(root, config, seed, write_reference)
    assume(case.refusal("onnx") is None)
    agrees(case, length, seed, "onnx")


DRAWN = {"config": configs(), "length": st.integers(1, 40), "seed": st.integers(0, 2**31)}
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]


@settings(max_examples=25, suppress_health_check=QUIET)
@example(config=CANCELLING, length=1, seed=1)
@given(**DRAWN)
def test_any_small_model_agrees_with_transformers(
    config: dict[str, Any], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    any_small_model_agrees(config, length, seed, tmp_path_factory.mktemp("drawn"))


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=QUIET)
@given(**DRAWN)
def test_a_thousand_small_models_agree_with_transformers(
    config: dict[str, Any], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    any_small_model_agrees(config, length, seed, tmp_path_factory.mktemp("drawn"))
