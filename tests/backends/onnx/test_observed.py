"""What matrices multiply, as told layer by layer, is what transformers' own modules get; and rounding by it works.

On a part of the text that nothing was seen of, over all shapes, a token's logits are off by 0.006 to 0.053 of their
standard deviation in eight bits: the median of tokens, and what there is of noise of activations in eight bits too. In
four bits it is 0.016 to 0.28, which is 0.15 to 0.85 of what it is where nothing is known of inputs. A norm that forgets
the factors of what it makes multiplies what eight bits lose by 3 to 14.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import SEED, Case, expected, model_of
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig, observed, quantized, weights
from xinfer.backends.onnx.runner import OnnxRunner
from xinfer.backends.torch import observed as by_torch
from xinfer.engine.types import Limits
from xinfer.models.dummy import byte_tokenizer
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme, Smoothed, quantizes, sites
from xinfer.models.quantize.text import sample_text
from xinfer.models.reader import Reader
from xinfer.models.windows import windows
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper
from xinfer.testing.tiny import tiny_config, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = [(family, name) for family, names in SHAPES.items() for name in names]
INT8, INT4 = Scheme(8, 32, True, "gptq"), Scheme(4, 32, False, "gptq")
LONGEST = 80
NOISE = 0.06  # of eight bits

# Modules of transformers that have a matrix, by how their names end; some have several of ours.
MODULES = {
    "attn.q": ("self_attn.q_proj", "attn.q_proj", "attn.c_attn"),
    "attn.k": ("self_attn.k_proj", "attn.k_proj", "attn.c_attn"),
    "attn.v": ("self_attn.v_proj", "attn.v_proj", "attn.c_attn"),
    "attn.o": ("self_attn.o_proj", "attn.out_proj", "attn.c_proj"),
    "attn.q_a": ("self_attn.q_a_proj",),
    "attn.q_b": ("self_attn.q_b_proj",),
    "attn.kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "mlp.gate": ("mlp.gate_proj",),
    "mlp.up": ("mlp.up_proj", "mlp.fc_in", "mlp.c_fc"),
    "mlp.down": ("mlp.down_proj", "mlp.fc_out", "mlp.c_proj"),
    "mlp.shared.gate": ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj"),
    "mlp.shared.up": ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
}
OBSERVED = [
    ("llama", "llama3"),
    ("llama", "linear"),
    ("gemma2", "usual"),
    ("gpt2", "usual"),
    ("deepseek_v3", "usual"),
    ("deepseek_v3", "plain"),
    ("qwen2_moe", "usual"),
    ("gpt_oss", "usual"),
    ("gptj", "usual"),
    ("cohere", "usual"),
    ("olmo2", "usual"),
    ("qwen3", "usual"),
]
# Tied and not, offsets and norms behind, biases, latent attention, experts of both kinds, parallel parts, no norms
# before, layer norms without factors, what is not gated.
SOME = {
    ("llama", "linear"),
    ("gemma2", "usual"),
    ("gpt2", "usual"),
    ("deepseek_v3", "usual"),
    ("qwen2_moe", "mixed"),
    ("gpt_oss", "usual"),
    ("gptj", "usual"),
    ("cohere", "usual"),
    ("olmo2", "usual"),
    ("olmo", "usual"),
    ("nemotron", "usual"),
    ("seed_oss", "bias"),
}
SLICE = [pytest.param(*each, marks=() if each in SOME else pytest.mark.slow, id="-".join(each)) for each in ALL]


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the text some windows are enough for tiny models."""
    monkeypatch.setattr(observed, "windows", lambda model, size: windows(model, size, 6))


def runner_of(model: Model, scheme: Scheme | None = None) -> OnnxRunner:
    model.quantization = scheme
    limits = Limits(max_model_len=LONGEST, max_num_seqs=1, max_num_batched_tokens=512, kv_memory=64e6)
    return OnnxRunner(BackendContext(model, OnnxConfig(device="cpu", threads=1), limits))


def logits_of(runner: OnnxRunner, prompt: list[int]) -> Tensor:
    stepper = Stepper(runner)
    return stepper.step([stepper.start(prompt)], [len(prompt)])[0]


# What is seen


def told(model: Model) -> Iterator[observed.Inputs]:
    with torch.inference_mode(), Reader(model.weights, torch.device("cpu"), torch.float32, []) as reader:
        yield from observed.observed(model, lambda recipe, form: weights.make(recipe, reader, form), 1)


@torch.inference_mode()
def hooked(reference: Any, windows: list[np.ndarray]) -> dict[str, Tensor]:
    """The mean of x' x over what each module with a matrix gets, in float64, by the module's name."""
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2).double()
        sums[name] = sums.get(name, 0) + rows.T @ rows

    for name, module in reference.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            module.register_forward_pre_hook(lambda module, given, name=name: add(name, given[0]))
    for window in windows:
        reference(torch.from_numpy(window.astype(np.int64))[None], use_cache=False)
    return {name: each / sum(map(len, windows)) for name, each in sums.items()}


def module_of(matrix: str, modules: dict[str, Tensor]) -> str:
    """Which module has a matrix of ours."""
    if matrix in ("embed.weight", "head.weight"):
        return "lm_head"
    _, layer, *part = matrix.removesuffix(".weight").split(".")
    ends = tuple(f".{layer}.{end}" for end in MODULES[".".join(part)])
    (found,) = (name for name in modules if name.endswith(ends))
    return found


@pytest.mark.parametrize(("family", "name"), OBSERVED, ids=["-".join(each) for each in OBSERVED])
def test_means_are_those_of_what_transformers_modules_get(family: str, name: str, tmp_path: Path) -> None:
    case = Case(tmp_path, shape(family, name), SEED, write_reference)
    model = model_of(case.folder)
    means = hooked(case.reference(), windows(model, min(512, model.spec.max_model_len), 6))
    seen: set[str] = set()
    for inputs in told(model):
        assert set(inputs.of.values()) == inputs.means.keys()
        for matrix, output in inputs.of.items():
            theirs = means[module_of(matrix, means)]
            ours = inputs.means[output]
            assert ours.shape == theirs.shape == (model.spec.tensors[matrix][1],) * 2
            assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max(), matrix
        assert not seen & inputs.of.keys()
        seen |= inputs.of.keys()
    table = set() if model.spec.tied else {"embed.weight"}  # of which rows are looked up
    all_of_them = {each for each, dims in model.spec.tensors.items() if quantizes(each, dims)}
    assert seen == {each for each in all_of_them - table if ".experts." not in each}


@pytest.mark.parametrize(("family", "name"), OBSERVED, ids=["-".join(each) for each in OBSERVED])
def test_the_torch_backends_are_told_the_same(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, shape(family, name), SEED, write_reference)
    model = model_of(case.folder)
    few = windows(model, min(512, model.spec.max_model_len), 6)
    monkeypatch.setattr(by_torch, "windows", lambda model, size: few)
    means = hooked(case.reference(), few)
    seen = [each for told in by_torch.observed(model) for each in told.items()]
    for matrix, ours in seen:
        theirs = means[module_of(matrix, means)]
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max(), matrix
    table = set() if model.spec.tied else {"embed.weight"}
    all_of_them = {each for each, dims in model.spec.tensors.items() if quantizes(each, dims)}
    assert {matrix for matrix, _ in seen} == {each for each in all_of_them - table if ".experts." not in each}


@pytest.mark.parametrize(("family", "name"), [("llama", "linear"), ("granitemoe", "usual")])
def test_each_part_is_told_by_itself(family: str, name: str, tmp_path: Path) -> None:
    """First the embedding, of which nothing is told, then each layer, then what comes before the head."""
    model = model_of(Case(tmp_path, shape(family, name), SEED, write_reference).folder)
    first, *layers, last = (set(inputs.of) for inputs in told(model))
    assert first == set()
    assert last == {"embed.weight" if model.spec.tied else "head.weight"}
    assert len(layers) == len(model.spec.layers)
    for index, layer in enumerate(layers):
        assert layer and all(matrix.startswith(f"layers.{index}.") for matrix in layer)


# What is made of it


def off(found: Tensor, exact: Tensor) -> float:
    """How far tokens' logits are off, the median, of their standard deviation."""
    return float((found - exact).abs().mean(-1).median() / exact.std())


def prompt_of(model: Model) -> list[int]:
    """Tokens of the same text, in a part that none of the windows are from."""
    tokens = np.array(byte_tokenizer().encode(sample_text()[1000:1064]))
    return (tokens % model.spec.vocab_size).tolist()


@pytest.mark.parametrize(("family", "name"), SLICE)
def test_logits_are_near_those_of_transformers_and_nearer_than_without_a_text(
    family: str, name: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, shape(family, name), SEED, write_reference)
    prompt = prompt_of(model_of(case.folder))
    exact = expected(case.reference(), prompt, LONGEST)
    by_weights = replace(INT4, method="hqq")
    found = {
        scheme: off(logits_of(runner_of(model_of(case.folder), scheme), prompt), exact)
        for scheme in (INT8, INT4, by_weights)
    }
    assert 0 < found[INT8] <= NOISE
    assert 0 < found[INT4] <= 0.95 * found[by_weights]


@pytest.mark.parametrize(("family", "name"), [("llama", "linear"), ("gptj", "usual"), ("deepseek_v3", "usual")])
def test_a_norm_that_is_not_divided_is_seen(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, shape(family, name), SEED, write_reference)
    model = model_of(case.folder)
    prompt = prompt_of(model)
    exact = expected(case.reference(), prompt, LONGEST)
    right = off(logits_of(runner_of(model, INT8), prompt), exact)  # what is rounded is kept, norms are made each time
    init = Smoothed.__init__
    for site in sites(model.spec):
        if site.norm is not None:

            def forget(smoothed: Smoothed, *given: Any, maker: str = site.makers[0]) -> None:
                init(smoothed, *given)
                smoothed._made.pop(maker)

            monkeypatch.setattr(Smoothed, "__init__", forget)
            wrong = off(logits_of(runner_of(model_of(case.folder), INT8), prompt), exact)
            assert wrong > 2 * right, site.name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])
def test_what_was_rounded_is_read_the_second_time(
    scheme: Scheme, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "m", tiny_config("llama", tie_word_embeddings=tied), seed=0)
    tokens, logits = Stepper(runner_of(model_of(folder), scheme)).greedy([5, 6, 7, 8], [3, 1], 20)

    def never(*_: object) -> None:
        raise AssertionError("it is computed again what matrices multiply")

    monkeypatch.setattr(quantized, "observed", never)
    again, same = Stepper(runner_of(model_of(folder), scheme)).greedy([5, 6, 7, 8], [3, 1], 20)
    assert again == tokens and torch.equal(same, logits)
    with pytest.raises(AssertionError, match="again"):
        runner_of(model_of(folder), Scheme(scheme.bits, 64, scheme.symmetric, "gptq"))
    runner_of(model_of(folder), Scheme(scheme.bits, 32, scheme.symmetric, "hqq"))  # which looks at weights alone


def test_of_dummies_nothing_is_seen_and_nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delattr(quantized, "observed")
    folder = write_folder(tmp_path / "m", tiny_config("llama", tie_word_embeddings=True), seed=0)
    found = {}
    for scheme in (INT8, Scheme(8, 32, True, "hqq")):
        model = Model(str(folder), lambda: folder, xinfer_model_families(), dtype="float32", load_format="dummy")
        found[scheme.method] = logits_of(runner_of(model, scheme), [1, 2, 3])
    assert bool(found["gptq"].isfinite().all())
    assert torch.equal(found["gptq"], found["hqq"])
    assert not (tmp_path / "cache" / "onnx" / "weights").exists()
