"""Evened-out inputs: the model stays what it was, so whatever is divided somewhere is multiplied wherever it goes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig
from xinfer.backends.onnx.runner import OnnxRunner
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme, Smoothed, sites
from xinfer.models.quantize.smoothing import LOOKUP, Site
from xinfer.testing.reference import reference_logits, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = [(family, name) for family, names in SHAPES.items() for name in names]
TOLERANCE = 1e-5  # of the range of logits; what float32 makes of it is at most 2.2e-6
LENGTH = 40
LIMITS = Limits(max_model_len=LENGTH, max_num_seqs=1, max_num_batched_tokens=64, kv_memory=16e6)


def written(root: Path, family: str, name: str) -> tuple[Model, Any]:
    """A model as we read it, and as transformers does."""
    folder = root / "model"
    reference = write_reference(folder, shape(family, name), 20)
    return Model("tiny", lambda: folder, xinfer_model_families(), dtype="float32"), reference


def spec_of(family: str, name: str):
    families = {each.name: each for each in xinfer_model_families()}
    return families[family].spec(shape(family, name))


def tokens_of(model: Model) -> list[int]:
    return np.random.default_rng(0).integers(0, model.spec.vocab_size, LENGTH).tolist()


def logits_of(runner: ModelRunner, tokens: list[int]) -> Tensor:
    stepper = Stepper(runner)
    return stepper.step([stepper.start(tokens)], [len(tokens)])[0]


def random_factors(model: Model) -> dict[str, Tensor]:
    """Of all sites but a tied embedding's, which eager does not divide again where it looks up tokens."""
    generator = torch.Generator().manual_seed(0)
    return {
        site.name: 0.3 * 10 ** torch.rand(model.spec.tensors[site.name][-1], generator=generator)
        for site in sites(model.spec)
        if site.name != "embed.weight"
    }


def off(model: Model, weights: Smoothed, reference: Any) -> float:
    """How far logits are off, of their range."""
    vars(model)["weights"] = weights
    runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), LIMITS))
    exact = reference_logits(reference, tokens_of(model))
    return float((logits_of(runner, tokens_of(model)) - exact).abs().max() / (exact.max() - exact.min()))


# The same model


@pytest.mark.parametrize(("family", "name"), ALL, ids=["-".join(each) for each in ALL])
def test_any_factors_leave_the_model_as_it_was(family: str, name: str, tmp_path: Path) -> None:
    model, reference = written(tmp_path, family, name)
    factors = random_factors(model)
    assert factors
    whole = model.weights
    assert off(model, Smoothed(whole, factors), reference) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "plain"), ("gpt_neox", "usual"), ("seed_oss", "bias"), ("deepseek_v3", "plain"), ("nemotron", "usual")],
)
def test_whatever_is_forgotten_is_seen(family: str, name: str, tmp_path: Path) -> None:
    model, reference = written(tmp_path, family, name)
    whole, factors = model.weights, random_factors(model)
    for site in sites(model.spec):
        if site.name.startswith(("layers.1", "head")):
            for part in (*site.makers, *site.users):
                forgetful = Smoothed(whole, factors)
                (forgetful._made if part in site.makers else forgetful._used).pop(part)
                assert off(model, forgetful, reference) > 30 * TOLERANCE, part


@pytest.mark.parametrize(("family", "name"), [("llama", "linear"), ("gemma2", "usual"), ("gpt2", "usual")])
def test_a_tied_embedding_is_looked_up_as_it_was_and_multiplied_as_the_last_norm_asks(
    family: str, name: str, tmp_path: Path
) -> None:
    model, _ = written(tmp_path, family, name)
    whole, width = model.weights, model.spec.hidden_size
    factors = 0.3 * 10 ** torch.rand(width, generator=torch.Generator().manual_seed(0))
    smoothed = Smoothed(whole, {"embed.weight": factors})
    embedding = whole.load("embed.weight")
    np.testing.assert_allclose(smoothed.load("embed.weight") * smoothed.load(LOOKUP), embedding, rtol=1e-6)
    x, norm = torch.randn(5, width, generator=torch.Generator().manual_seed(1)), model.spec.norm
    heads = []
    for weights in (whole, smoothed):
        normed = x * (weights.load("norm.weight") + norm.offset)
        normed = normed + weights.load("norm.bias") if norm.bias else normed
        heads.append(normed @ weights.load("embed.weight").T)
    np.testing.assert_allclose(heads[0], heads[1], atol=1e-5 * float(heads[0].abs().max()))
    assert torch.equal(Smoothed(whole, {}).load(LOOKUP), torch.ones(width))


def test_a_graph_of_a_tied_model_looks_up_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits lose 0.05 of logits' standard deviation; without the division at the lookup it is more than thrice."""
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "cache"))
    model, reference = written(tmp_path, "llama", "linear")
    assert model.spec.tied
    model.quantization = Scheme(8, 32, True, "gptq")
    exact = reference_logits(reference, tokens_of(model))

    def lost() -> float:
        runner = OnnxRunner(BackendContext(model, OnnxConfig(device="cpu", threads=1), LIMITS))
        return float((logits_of(runner, tokens_of(model)) - exact).square().mean().sqrt() / exact.std())

    assert 0 < lost() <= 0.08
    load = Smoothed.load
    monkeypatch.setattr(Smoothed, "load", lambda self, name: load(self, name) ** (name != LOOKUP))
    assert lost() > 0.16


# Which inputs


def normed(where: str, users: str, bias: bool = False) -> tuple[set[str], set[str]]:
    """A norm and the matrices behind it."""
    return {f"{where}.weight"} | ({f"{where}.bias"} if bias else set()), {f"{name}.weight" for name in users.split()}


QKV, GATED = "attn.q attn.k attn.v", "mlp.gate mlp.up"
BETWEEN = ({"mlp.up.weight"}, {"mlp.down.weight"})
PLAIN = [normed("attn_norm", QKV), normed("mlp_norm", GATED), BETWEEN]
TIED, UNTIED = [normed("norm", "embed")], [normed("norm", "head")]
# Of each layer, then of what is behind the last. Where experts are chosen a router multiplies the input too, what a
# norm behind attention makes is added to others, and what is between ungated matrices is no line through zero.
BY_HAND = {
    ("llama", "linear"): ([PLAIN] * 3, TIED),
    ("llama", "plain"): ([PLAIN] * 3, UNTIED),
    ("gemma2", "usual"): ([PLAIN] * 3, TIED),
    ("gpt2", "usual"): (
        [[normed("attn_norm", QKV, True), normed("mlp_norm", "mlp.up", True)]] * 3,
        [normed("norm", "embed", True)],
    ),
    ("seed_oss", "bias"): (
        [[*PLAIN[:2], ({"mlp.up.weight", "mlp.up.bias"}, {"mlp.down.weight"})]] * 3,
        UNTIED,
    ),
    ("qwen2_moe", "usual"): ([PLAIN[:1]] * 3, UNTIED),
    ("qwen2_moe", "mixed"): ([PLAIN[:1], PLAIN, PLAIN[:1]], UNTIED),
    ("gpt_oss", "usual"): ([PLAIN[:1]] * 3, UNTIED),
    ("deepseek_v3", "usual"): (
        [[normed("attn_norm", "attn.q_a attn.kv_a"), *PLAIN[1:]]] + [[normed("attn_norm", "attn.q_a attn.kv_a")]] * 2,
        UNTIED,
    ),
    ("deepseek_v3", "plain"): ([[normed("attn_norm", "attn.q attn.kv_a")]] * 3, UNTIED),
    ("gptj", "usual"): ([[normed("attn_norm", f"{QKV} mlp.up", True)]] * 3, [normed("norm", "head", True)]),
    ("gpt_neox", "usual"): (
        [[normed("attn_norm", QKV, True), normed("mlp_norm", "mlp.up", True)]] * 3,
        [normed("norm", "head", True)],
    ),
    ("cohere", "usual"): ([[normed("attn_norm", f"{QKV} {GATED}"), BETWEEN]] * 3, TIED),
    ("olmo2", "usual"): ([[BETWEEN]] * 3, UNTIED),
    ("olmo", "usual"): ([[BETWEEN]] * 3, []),
}


@pytest.mark.parametrize(("family", "name"), BY_HAND, ids=["-".join(each) for each in BY_HAND])
def test_sites_are_those_that_can_be_told_by_hand(family: str, name: str) -> None:
    layers, behind = BY_HAND[family, name]
    expected = [
        tuple({f"layers.{index}.{part}" for part in parts} for parts in site)
        for index, layer in enumerate(layers)
        for site in layer
    ] + behind
    found = [(set(site.makers), set(site.users)) for site in sites(spec_of(family, name))]
    assert len(found) == len(expected)
    assert all(site in expected for site in found), found


@pytest.mark.parametrize(("family", "name"), ALL, ids=["-".join(each) for each in ALL])
def test_every_part_of_a_site_is_there_and_belongs_to_no_other(family: str, name: str) -> None:
    spec = spec_of(family, name)
    found = list(sites(spec))
    for parts in ([part for site in found for part in site.makers], [part for site in found for part in site.users]):
        assert len(parts) == len(set(parts))
        assert set(parts) <= spec.tensors.keys()
    for site in found:
        widths = {spec.tensors[user][1] for user in site.users} | {spec.tensors[maker][0] for maker in site.makers}
        assert len(widths) == 1
        stem = site.makers[0].removesuffix("weight")
        assert set(site.makers) == {part for part in spec.tensors if part.startswith(stem)}
        assert (site.norm is not None) == ("norm" in site.makers[0])


# Which factors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return written(tmp_path_factory.mktemp("llama"), "llama", "plain")[0]


def first_site(model: Model) -> Site:
    return next(iter(sites(model.spec)))


def test_a_sites_factors_are_chosen_once(llama: Model) -> None:
    smoothed = Smoothed(llama.weights, {})
    first = smoothed.even_out("layers.0.attn.k.weight", torch.rand(48), 4)
    assert first is not None
    for user, bits in (("q", 4), ("v", 8), ("k", 8)):
        again = smoothed.even_out(f"layers.0.attn.{user}.weight", torch.rand(48), bits)
        assert again is not None and torch.equal(again, first)
    assert smoothed.factors.keys() == {first_site(llama).name}
    other = smoothed.even_out("layers.1.attn.k.weight", torch.rand(48), 4)
    assert other is not None and not torch.equal(other, first)
    assert smoothed.even_out("layers.0.attn.o.weight", torch.rand(48), 4) is None
    assert len(smoothed.factors) == 2
    assert torch.equal(
        smoothed.load("layers.0.attn.v.weight"), llama.weights.load("layers.0.attn.v.weight").float() * first
    )


@given(st.integers(0, 1 << 30), st.sampled_from([1e-12, 1e-3, 1.0, 1e6]), st.sampled_from([(8, 0.45), (4, 0.25)]))
def test_factors_are_a_power_of_root_mean_squares_and_one_on_average(
    llama: Model, seed: int, size: float, power: tuple[int, float]
) -> None:
    squares = size * 10 ** np.random.default_rng(seed).uniform(-2, 2, 48)
    bits, exponent = power
    found = Smoothed(llama.weights, {}).even_out("layers.0.attn.q.weight", torch.from_numpy(squares).float(), bits)
    assert found is not None
    expected = np.sqrt(squares) ** exponent
    expected /= np.exp(np.log(expected).mean())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert abs(float(found.double().log().mean())) < 1e-5
    assert (np.argsort(found.numpy()) == np.argsort(squares)).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_inputs_that_are_always_zero_get_factors_too(llama: Model, bits: int, size: float) -> None:
    squares = torch.rand(48, generator=torch.Generator().manual_seed(0)) * size
    squares[[0, 7, 31]] = 0
    found = Smoothed(llama.weights, {}).even_out("layers.0.attn.q.weight", squares, bits)
    assert found is not None and bool((found.isfinite() & (found > 0)).all())
    assert found.min() == found[0] and found.max() / found.min() < 2000
    none = Smoothed(llama.weights, {}).even_out("layers.0.attn.q.weight", torch.zeros(48), bits)
    assert none is not None and torch.equal(none, torch.ones(48))
