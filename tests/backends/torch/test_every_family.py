"""Every family computes what transformers computes, from checkpoints that transformers wrote.

In CI the first shape of each family goes through all checks, the others through the first one; `-m slow` takes all.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT, SEED, STEPS, TOLERANCE, Case, agrees, difference, expected, in_company
from drawn import CANCELLING, configs
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xinfer.engine.runner import LEVELS
from xinfer.models.families import xinfer_model_families
from xinfer.testing.reference import parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import cut

PARTS_OF_LARGER_ONES = ("mistral4", "qwen2_vl", "qwen3_vl_text")  # compared in tests/models/test_multimodal.py
LONGEST = PROMPT + STEPS
ALL = [(family, name) for family, names in SHAPES.items() for name in names]
FIRST = [(family, names[0]) for family, names in SHAPES.items()]
SLICE = [pytest.param(*each, marks=() if each in FIRST else pytest.mark.slow, id="-".join(each)) for each in ALL]


pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(family: str, name: str, root: Path) -> Case:
    return Case(root, shape(family, name), SEED, write_reference, LONGEST)


def test_every_family_has_a_shape() -> None:
    specs = {family.spec for family in xinfer_model_families()}
    compared = {family.spec for family in xinfer_model_families() if family.name in {*SHAPES, *PARTS_OF_LARGER_ONES}}
    assert specs == compared


@pytest.mark.parametrize(("family", "name"), ALL, ids=["-".join(each) for each in ALL])
def test_logits_are_those_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    case = case_of(family, name, tmp_path)
    chunks = cut(PROMPT, np.random.default_rng(1))
    found = parity(case.ours(), case.reference(), case.prompt(), STEPS, chunks)
    assert found.difference <= TOLERANCE
    assert found.first_other_token is None
    assert found.spread >= 1


@pytest.mark.parametrize(("family", "name"), SLICE)
def test_it_does_not_matter_who_shares_the_step(family: str, name: str, tmp_path: Path) -> None:
    case = case_of(family, name, tmp_path)
    reference = case.reference()
    for sequence, logits in in_company(case.ours(), case):
        theirs = expected(reference, sequence.token_ids[: sequence.num_computed], LONGEST)
        assert difference(logits, theirs) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "name"), SLICE)
def test_an_invariant_row_is_the_same_bit_for_bit_however_it_is_computed(
    family: str, name: str, dtype: str, tmp_path: Path
) -> None:
    case = case_of(family, name, tmp_path)
    runner = case.ours(dtype, "invariant")
    assert runner.runner.info.levels == LEVELS
    for sequence, logits in in_company(runner, case):
        tokens = sequence.token_ids[: sequence.num_computed]
        whole = runner.step([runner.start(tokens)], [len(tokens)])[0]
        assert torch.equal(logits, whole)
        if dtype == "float32":
            assert difference(whole, expected(case.reference(), tokens, LONGEST)) <= TOLERANCE


@pytest.mark.parametrize(("family", "name"), SLICE)
def test_bfloat16_strays_from_float32_no_further_than_transformers_does(family: str, name: str, tmp_path: Path) -> None:
    """Both round, each in its own places: half as much again is allowed; what is wrong is several times as far off.

    Compared is the median over positions, for where rounding chooses another expert a position is far off.
    """
    case = case_of(family, name, tmp_path)
    prompt = case.prompt()
    tokens, logits = case.ours("bfloat16").greedy(prompt, [20, PROMPT - 20], 16)
    exact = expected(case.reference(), prompt + tokens, LONGEST)
    theirs = expected(case.reference(torch.bfloat16), prompt + tokens, LONGEST)
    ours_off, theirs_off = ((each - exact).square().mean(-1).sqrt().median() for each in (logits, theirs))
    assert ours_off <= 1.5 * theirs_off


EPS = {"rms_norm_eps": 1e-3}
PLANTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "theta": ("mixtral", "usual", {"rope_theta": 0.99e6}),
    "local theta": ("gemma3_text", "usual", {"rope_local_base_freq": 99.0}),
    "global theta": ("gemma3_text", "usual", {"rope_theta": 4950.0}),
    "rms epsilon": ("gemma2", "usual", EPS),
    "layer norm epsilon": ("cohere2", "usual", {"layer_norm_eps": 1e-3}),
    "epsilon of queries and keys": ("qwen3", "usual", EPS),
    "window too wide": ("gpt_oss", "usual", {"sliding_window": 10}),
    "window too narrow": ("cohere2", "usual", {"sliding_window": 8}),
    "window in other layers": ("gemma3_text", "usual", {"sliding_window_pattern": 3}),
    "router not normalized": ("qwen3_moe", "usual", {"norm_topk_prob": False}),
    "router normalized": ("qwen3_moe", "mixed", {"norm_topk_prob": True}),
    "router's scale": ("deepseek_v3", "usual", {"routed_scaling_factor": 2.4}),
    "router's groups": ("deepseek_v3", "usual", {"topk_group": 3}),
    "experts in other layers": ("deepseek_v3", "usual", {"rope_interleave": False}),
    "score cap": ("gemma2", "usual", {"attn_logit_softcapping": 45.0}),
    "logit cap": ("gemma2", "uncapped", {"final_logit_softcapping": 5.1}),
    "logit scale": ("cohere2", "usual", {"logit_scale": 0.81}),
    "score scale": ("gemma3_text", "usual", {"query_pre_attn_scalar": 21}),
    "cut of experts": ("gpt_oss", "usual", {"swiglu_limit": 1.6}),
    "yarn's factor": ("llama", "yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "activation": ("gpt2", "usual", {"activation_function": "gelu"}),
    "part that turns": ("phi3", "partial", {"partial_rotary_factor": 0.667}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_exceeds_the_tolerance(name: str, tmp_path: Path) -> None:
    family, base, changes = PLANTED[name]
    case = case_of(family, base, tmp_path)
    _, logits = case.ours(**changes).greedy(case.prompt(), [PROMPT], 0)
    assert difference(logits, expected(case.reference(), case.prompt(), LONGEST)) > 3 * TOLERANCE


DRAWN = {"config": configs(), "length": st.integers(1, 40), "seed": st.integers(0, 2**31)}
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]


@settings(max_examples=25, suppress_health_check=QUIET)
@example(config=CANCELLING, length=1, seed=1)
@given(**DRAWN)
def test_any_small_model_agrees_with_transformers(
    config: dict[str, Any], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    agrees(Case(tmp_path_factory.mktemp("drawn"), config, seed, write_reference), length, seed)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=QUIET)
@given(**DRAWN)
def test_a_thousand_small_models_agree_with_transformers(
    config: dict[str, Any], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    agrees(Case(tmp_path_factory.mktemp("drawn"), config, seed, write_reference), length, seed)
