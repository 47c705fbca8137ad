"""The torch decoder computes what transformers computes, from the very same folder on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT, SEED, STEPS, TOLERANCE, Case, difference, expected, generated, in_company
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xinfer.engine.runner import LEVELS
from xinfer.testing.stepper import cut
from xinfer.testing.tiny import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-small-vocabulary": ("llama", {"tie_word_embeddings": True, "vocab_size": 64, "eos_token_id": 2}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-linear-type": ("llama", {"rope_scaling": {"type": "linear", **LINEAR}}),
    "llama-linear-rope-type": ("llama", {"rope_scaling": {"rope_type": "linear", **LINEAR}}),
    "llama-llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "llama-parameters": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-parameters-llama3": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 777.0},
    ),
    "mistral": ("mistral", {}),
    "mistral-odd-window": ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "mistral-window-2": ("mistral", {"sliding_window": 2}),
    "mistral-whole": ("mistral", {"sliding_window": None, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-mha-tied": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2-window-unused": ("qwen2", {"sliding_window": 8}),
    "qwen2-later-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-mqa-bias": ("qwen3", {"num_key_value_heads": 1, "attention_bias": True}),
    "qwen3-mha-tied": ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 16}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> "Case":
    family, changes = CASES[request.param]
    return Case(tmp_path, tiny_config(family, **changes))


def test_logits_and_greedy_tokens_are_those_of_transformers(case: Case) -> None:
    reference, prompt = case.reference(), case.prompt()
    tokens, logits = case.ours().greedy(prompt, [PROMPT], STEPS)
    theirs = expected(reference, prompt + tokens)
    assert difference(logits, theirs) <= TOLERANCE
    assert theirs.std() >= 1
    assert tokens == generated(reference, prompt, STEPS)


def test_it_does_not_matter_how_the_prompt_is_cut(case: Case) -> None:
    runner, prompt = case.ours(), case.prompt()
    rng = np.random.default_rng(1)
    whole = runner.greedy(prompt, [PROMPT], 8)[0]
    theirs = expected(case.reference(), prompt + whole)
    for _ in range(3):
        tokens, logits = runner.greedy(prompt, cut(PROMPT, rng), 8)
        assert tokens == whole
        assert difference(logits, theirs) <= TOLERANCE


def test_it_does_not_matter_who_shares_the_step(case: Case) -> None:
    reference = case.reference()
    for sequence, logits in in_company(case.ours(), case):
        theirs = expected(reference, sequence.token_ids[: sequence.num_computed])
        assert difference(logits, theirs) <= TOLERANCE
        outputs = sequence.output_token_ids
        assert outputs == theirs[sequence.num_prompt - 1 :].argmax(-1).tolist()[: len(outputs)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_invariant_row_is_the_same_bit_for_bit_however_it_is_computed(case: Case, dtype: str) -> None:
    runner = case.ours(dtype, "invariant")
    assert runner.runner.info.levels == LEVELS
    for sequence, logits in in_company(runner, case):
        tokens = sequence.token_ids[: sequence.num_computed]
        whole = runner.step([runner.start(tokens)], [len(tokens)])[0]
        assert torch.equal(logits, whole)
        if dtype == "float32":
            assert difference(whole, expected(case.reference(), tokens)) <= TOLERANCE


@pytest.mark.parametrize("threads", [1, 3])
def test_widths_that_fill_no_register_are_invariant_too(tmp_path: Path, threads: int) -> None:
    """Vectorized loops treat what is left over in another way, and threads cut loops where they like."""
    sizes = {"hidden_size": 60, "intermediate_size": 333, "num_attention_heads": 3, "num_key_value_heads": 1}
    case = Case(tmp_path, tiny_config("llama", head_dim=20, max_position_embeddings=1024, **sizes), SEED)
    torch.set_num_threads(threads)
    try:
        runner = case.ours(determinism="invariant")
        assert runner.runner.info.levels == LEVELS
        prompt = case.prompt(500)
        whole = runner.greedy(prompt, [500], 6)
        for seed in range(4):
            cuts = cut(500, np.random.default_rng(seed))
            tokens, logits = runner.greedy(prompt, cuts, 6)
            assert tokens == whole[0]
            assert torch.equal(logits, whole[1])
    finally:
        torch.set_num_threads(1)


PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "rope theta one per cent off": ("llama", {"rope_theta": 10_100.0}),
    "norm epsilon ten times too large": ("llama", {"rms_norm_eps": 1e-4}),
    "rope factor one per cent off": ("llama-linear-type", {"rope_scaling": {"type": "linear", "factor": 4.04}}),
    "rope scaling left out": ("llama-llama3", {"rope_scaling": None}),
    "llama3's boundary off": (
        "llama-llama3",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 1.1}},
    ),
    "window one too wide": ("mistral", {"sliding_window": 17}),
    "window one too narrow": ("mistral", {"sliding_window": 15}),
    "window left out": ("mistral", {"sliding_window": None}),
    "window in the wrong layers": ("qwen2-later-layers", {"max_window_layers": 2}),
    "query/key norm epsilon too large": ("qwen3", {"rms_norm_eps": 1e-4}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_exceeds_the_tolerance(name: str, tmp_path: Path) -> None:
    base, changes = PLANTED[name]
    family, own = CASES[base]
    case = Case(tmp_path, tiny_config(family, **own))
    _, logits = case.ours(**changes).greedy(case.prompt(), [PROMPT], 0)
    assert difference(logits, expected(case.reference(), case.prompt())) > 3 * TOLERANCE


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a small model; what transformers refuses (llama's hidden size, an odd width of heads) is left out."""
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    config = tiny_config(
        family,
        vocab_size=draw(st.integers(5, 90)),
        hidden_size=heads * draw(st.sampled_from([2, 6, 8, 16])),
        intermediate_size=draw(st.integers(1, 70)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([100.0, 1e4, 1e6])),
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=0,
        eos_token_id=1,
    )
    if family in ("llama", "qwen3"):
        config |= {"head_dim": draw(st.sampled_from([2, 4, 10, 32])), "attention_bias": draw(st.booleans())}
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    if family == "mistral":
        config["sliding_window"] = window
    elif family != "llama" and window:
        full = draw(st.integers(0, 3))
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": full}
    return config


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs(), length=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_any_small_model_agrees_with_transformers(
    config: dict[str, Any], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = Case(tmp_path_factory.mktemp("drawn"), config, seed)
    prompt = case.prompt(length, seed)
    tokens, logits = case.ours().greedy(prompt, cut(length, np.random.default_rng(seed)), 6)
    assert difference(logits, expected(case.reference(), prompt + tokens)) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_strays_from_float32_no_further_than_transformers_does(family: str, tmp_path: Path) -> None:
    """Two correct bfloat16 decoders round differently, so the bound is the reference's own distance from float32.

    Half as much again is allowed, as the distance is itself a sum of random roundings; what is wrong (a rotation or a
    sum of squares in bfloat16, say) is several times as far away.
    """
    case = Case(tmp_path, tiny_config(family))
    prompt = case.prompt()
    tokens, logits = case.ours("bfloat16").greedy(prompt, [20, PROMPT - 20], 16)
    exact = expected(case.reference(), prompt + tokens)
    theirs = expected(case.reference(torch.bfloat16), prompt + tokens)
    assert (logits - exact).square().mean().sqrt() <= 1.5 * (theirs - exact).square().mean().sqrt()
