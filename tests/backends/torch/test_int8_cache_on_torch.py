"""Models whose cache has codes compute what transformers does where keys and values are rounded in float64.

A number near the middle between two codes may get either, for its last digits differ between the two sides: one in
some ten thousand, off by a step. All numbers are off by a twelfth of a squared step by being rounded, so a share f of
other codes is seen as sqrt(12 f) of what rounding itself does to logits; `NEAR` allows for f of 1 in 500.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT, SEED, Case, eager_runner, expected, in_company, model_of, stepper
from test_requests_on_torch import two_processes
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.torch import CompileConfig, EagerConfig, choosing, create, decoder, entries, linear, mlp, supports
from xinfer.backends.torch import codes as codes_of_weights
from xinfer.engine.runner import LEVELS
from xinfer.engine.types import Limits
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.stepper import Stepper, cut
from xinfer.testing.tiny import tiny_config, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = 0.15
LARGEST = {"int8": 127, "fp8": 448}
# Heads that share keys, a window, capped scores with windows, sinks, norms of keys, heads turned in part.
FAMILIES = {
    "llama": "linear",
    "mistral": "window",
    "gemma2": "usual",
    "gpt_oss": "usual",
    "qwen3": "usual",
    "gpt_neox": "usual",
}


def rounded(x: Tensor, kept: str) -> Tensor:
    """Return x [..., D] rounded to the codes whose largest is that of each row, in float64."""
    scales = x.double().abs().amax(-1, keepdim=True) / LARGEST[kept]
    codes = x.double() / scales
    codes = codes.round() if kept == "int8" else codes.to(torch.float8_e4m3fn).double()
    return (codes * scales).to(x.dtype)


@contextmanager
def rounding(model: Any, kept: str) -> Iterator[None]:
    """Have transformers' model attend to rounded keys and values."""
    module = sys.modules[type(model).__module__]
    exact = module.eager_attention_forward

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        return exact(layer, query, rounded(key, kept), rounded(value, kept), *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", attend)
        yield


def near(ours: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    """Whether logits are those of the rounded model, measured by what rounding changes."""
    changed = (theirs - exact).square().mean().sqrt()
    assert changed > 1e-4  # else there were nothing to be seen
    return bool((ours - theirs).square().mean().sqrt() <= NEAR * changed)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("model"), shape(request.param, FAMILIES[request.param]), SEED, write_reference)


@pytest.mark.parametrize("kept", LARGEST)
@pytest.mark.parametrize("way", ["operators", "torch", "invariant"])
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    way: str, kept: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch":
        for module in (choosing, entries, linear, mlp, codes_of_weights, decoder):
            monkeypatch.setattr(module, "available", lambda: False, raising=False)
    determinism = "invariant" if way == "invariant" else "fast"
    reference, prompt = case.reference(), case.prompt()
    with rounding(reference, kept):
        theirs = expected(reference, prompt)
    exact = expected(reference, prompt)
    for chunks in ([PROMPT], cut(PROMPT, np.random.default_rng(1)), [1] * PROMPT):
        ours = case.ours(determinism=determinism, backend=f"eager {kept}").greedy(prompt, chunks, 0)[1]
        assert near(ours, theirs, exact)


def test_it_does_not_matter_who_shares_the_step(case: Case) -> None:
    reference = case.reference()
    for sequence, logits in in_company(case.ours(backend="eager int8"), case):
        text = sequence.token_ids[: sequence.num_computed]
        with rounding(reference, "int8"):
            theirs = expected(reference, text)
        assert near(logits, theirs, expected(reference, text))


@pytest.mark.slow  # two graphs are compiled
def test_compiled_graphs_do_the_same(tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_config("qwen3"))
    reference, prompt = case.reference(), case.prompt()
    with rounding(reference, "int8"):
        theirs = expected(reference, prompt)
    exact = expected(reference, prompt)
    runner = case.ours(backend="compile int8")
    for chunks in ([PROMPT], [1] * PROMPT):
        assert near(runner.greedy(prompt, chunks, 0)[1], theirs, exact)


@pytest.mark.parametrize("kept", LARGEST)
def test_rows_are_alike_bit_for_bit_where_that_is_promised(kept: str, tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_config("qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=2))
    runner = case.ours(determinism="invariant", backend=f"eager {kept}")
    assert runner.runner.info.levels == LEVELS
    alone = case.ours(determinism="invariant", backend=f"eager {kept}")
    for sequence, logits in in_company(runner, case):
        text = sequence.token_ids[: sequence.num_computed]
        assert torch.equal(logits, alone.greedy(text, [len(text)], 0)[1])
        assert torch.equal(logits, alone.greedy(text, [1] * len(text), 0)[1])


def test_a_copied_block_is_the_same(tmp_path: Path) -> None:
    """Scales and all: a text that goes on in the copy gets the logits that it gets where it was."""
    case = Case(tmp_path, tiny_config("llama"))
    for kept in LARGEST:
        runner = case.ours(backend=f"eager {kept}")
        prompt = case.prompt(14)
        first = runner.start(prompt)
        runner.step([first], [13])
        copy = runner.start(prompt)
        runner.take(copy)
        runner.runner.copy(first.blocks[0], copy.blocks[0], 13)
        copy.num_computed = 13
        (ours,), (theirs,) = runner.step([copy], [1]), runner.step([first], [1])
        assert torch.equal(ours, theirs)


def test_the_cache_takes_about_a_quarter_and_holds_as_much_more(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    model = model_of(write_folder(tmp_path / "m", config, seed=0))
    heads, width, layers = config["num_key_value_heads"], config["head_dim"], config["num_hidden_layers"]
    size = 4096 * layers * heads * 2 * width
    infos = {kept: eager_runner(model, Limits(kv_memory=size), kept).info for kept in (None, *LARGEST)}
    assert infos[None].kv_token_bytes == layers * 2 * heads * width * 4
    for kept in LARGEST:
        assert infos[kept].kv_token_bytes == layers * 2 * heads * (width + 4)
        assert infos[kept].kv_cache_bytes <= size
        assert infos[kept].num_blocks == size // (16 * infos[kept].kv_token_bytes)
        assert infos[kept].notes == (f"the KV cache is {kept}",)
    assert infos[None].notes == ()


def test_streamed_layers_find_their_codes(tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_config("llama"))
    streamed, whole = (case.ours(backend="eager int8", held=held) for held in ({"stream_layers": 1}, {}))
    prompt = case.prompt()
    assert torch.equal(streamed.greedy(prompt, [PROMPT], 4)[1], whole.greedy(prompt, [PROMPT], 4)[1])


def test_half_precision_is_near_what_it_is_without_codes(tmp_path: Path) -> None:
    """By no more than rounding does in float32, and what half precision itself does."""
    case = Case(tmp_path, tiny_config("llama"))
    prompt = case.prompt()
    exact = case.ours().greedy(prompt, [PROMPT], 0)[1]

    def off(dtype: str, backend: str) -> Tensor:
        chunks = [20, 1, 1, PROMPT - 22]
        return (case.ours(dtype, backend=backend).greedy(prompt, chunks, 0)[1] - exact).square().mean().sqrt()

    for dtype in ("bfloat16", "float16"):
        assert off(dtype, "eager int8") <= 2 * (off(dtype, "eager") ** 2 + off("float32", "eager int8") ** 2).sqrt()


@pytest.mark.parametrize("config", [EagerConfig, CompileConfig])
def test_what_it_can_not_keep_is_refused_by_name(config: Any, tmp_path: Path) -> None:
    spec = model_of(write_folder(tmp_path / "llama", tiny_config("llama"), seed=0)).spec
    assert all(supports(spec, config(kv_dtype=kept)) is None for kept in (None, *LARGEST))
    reason = supports(spec, config(kv_dtype="int9")) or ""
    assert "backend.kv_dtype=int9 is none of null, int8 and fp8 (did you mean 'int8'" in reason
    latent = model_of(write_folder(tmp_path / "latent", shape("deepseek_v3", "usual"), seed=0)).spec
    assert supports(latent, config()) is None
    assert "layers[0].attention.latent is set" in (supports(latent, config(kv_dtype="int8")) or "")


@pytest.mark.slow  # that two processes find each other and share heads, quicker tests say
def test_two_processes_have_their_own_heads_codes(tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_config("qwen3"))
    reference, prompt = case.reference(), case.prompt()
    with rounding(reference, "int8"):
        theirs = expected(reference, prompt)
    runner = two_processes(case, kv_dtype="int8")
    ours = Stepper(runner).greedy(prompt, [20, 1, PROMPT - 21], 0)[1]
    runner.close()
    assert near(ours, theirs, expected(reference, prompt))


def test_rubbish_in_unused_slots_is_never_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_config("llama"), seed=0)
    runner = stepper(folder, "float32", "fast", backend="eager int8")
    assert bool(runner.greedy([1, 2, 3], [3], 20)[1].isfinite().all())


def test_the_commands_own_way_makes_the_same_runner(tmp_path: Path) -> None:
    model = model_of(write_folder(tmp_path / "m", tiny_config("llama"), seed=0))
    runner = create(BackendContext(model, EagerConfig(device="cpu", kv_dtype="fp8"), Limits(kv_memory=1e6)))
    assert runner.info.notes == ("the KV cache is fp8",)
    assert bool(Stepper(runner).greedy([1, 2, 3], [3], 4)[1].isfinite().all())
