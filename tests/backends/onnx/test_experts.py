"""Routers and experts in the graph compute what their spec says, token by token, in float64."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.backends.onnx import OnnxConfig, supports
from xinfer.backends.onnx import weights as recipes
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.graph import Graph
from xinfer.backends.onnx.linear import Writer
from xinfer.backends.onnx.mlp import feed_forward
from xinfer.backends.onnx.session import open_session
from xinfer.models.families import xinfer_model_families
from xinfer.models.quantize import Scheme, quantize
from xinfer.models.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from xinfer.testing.shapes import SHAPES, shape

FUNCTIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


class Held:
    """Weights of a layer that lie in memory, drawn."""

    def __init__(self, spec: DecoderSpec, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.spec = spec
        self.arrays = {
            name: rng.standard_normal(dims, np.float32) / np.float32(math.sqrt(dims[-1]) if len(dims) > 1 else 1)
            for name, dims in spec.tensors.items()
            if ".mlp." in name
        }

    def load(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name])


def decoder(mlp: MlpSpec, hidden: int) -> DecoderSpec:
    layer = LayerSpec(AttentionSpec(1, 1, 2), mlp, None, None)
    return DecoderSpec("drawn", 3, hidden, 8, tied=True, layers=(layer,), norm=NormSpec(1e-6))


def computed(held: Held, x: np.ndarray, form: Form) -> np.ndarray:
    """What a session makes of x [B, S, H]."""
    graph = Graph(ir.DataType.FLOAT)
    writer = Writer(graph, held.spec, form)
    out = feed_forward(writer, graph.input("x", ["rows", "tokens", x.shape[-1]]), 0)
    graph.output(out, "y", ["rows", "tokens", x.shape[-1]])
    made = {name: recipes.make(recipe, held, form) for name, recipe in graph.recipes.items()}
    if form.scheme is None:
        assert sum(each.numel() for each in made.values()) == sum(each.size for each in held.arrays.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        ir.save(graph.model({}), path)
        return open_session(path, made, ["CPUExecutionProvider"], 1).run(None, {"x": x})[0]


def expected(held: Held, x: np.ndarray) -> np.ndarray:
    rows = [_token(held, token) for token in x.reshape(-1, x.shape[-1]).astype(np.float64)]
    return np.reshape(rows, x.shape)


def _token(held: Held, x: np.ndarray) -> np.ndarray:
    mlp, arrays = held.spec.layers[0].mlp, {name.removeprefix("layers.0.mlp."): a for name, a in held.arrays.items()}
    spec = mlp.experts
    total = np.zeros_like(x)
    for expert, weight in routing(spec, arrays, x).items():
        each = {name: a[expert] for name, a in arrays.items() if name.startswith("experts.")}
        total += weight * _one(mlp, each, "experts.", x)
    if spec.shared is not None:
        shared = _one(mlp, arrays, "shared.", x)
        total += shared / (1 + np.exp(-(arrays["shared_gate.weight"][0] @ x))) if spec.shared_gate else shared
    return total


def routing(spec: ExpertsSpec, arrays: dict[str, np.ndarray], x: np.ndarray) -> dict[int, float]:
    """The chosen experts' weights by their numbers; of equal scores those of lower numbers."""
    logits = (arrays["router.weight"] * x).sum(-1) + (arrays["router.bias"] if spec.router_bias else 0)
    scores = np.exp(logits - logits.max()) if spec.score == "softmax" else 1 / (1 + np.exp(-logits))
    if spec.score == "softmax":
        scores /= scores.sum()
    preferred = scores + arrays["router.correction"] if spec.correction else scores.copy()
    if spec.groups > 1:
        grouped = preferred.reshape(spec.groups, -1)
        best = np.sort(grouped, -1)[:, -1 if spec.group_score == "best" else -2 :].sum(-1)
        grouped[np.argsort(-best, kind="stable")[spec.chosen_groups :]] = -np.inf
    chosen = np.argsort(-preferred, kind="stable")[: spec.chosen]
    weights = scores[chosen] / (scores[chosen].sum() if spec.normalized else 1) * spec.scale
    return dict(zip(chosen.tolist(), weights.tolist(), strict=True))


def _one(mlp: MlpSpec, arrays: dict[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    def product(name: str, of: np.ndarray) -> np.ndarray:
        out = arrays[f"{prefix}{name}.weight"].astype(np.float64) @ of
        return out + arrays[f"{prefix}{name}.bias"] if mlp.bias else out

    up = product("up", x)
    if not mlp.gated:
        return product("down", FUNCTIONS[mlp.activation](up))
    gate = product("gate", x)
    if mlp.activation != "swiglu":
        return product("down", FUNCTIONS[mlp.activation](gate) * up)
    gate, up = np.minimum(gate, mlp.limit), np.clip(up, -mlp.limit, mlp.limit)
    return product("down", gate / (1 + np.exp(-mlp.alpha * gate)) * (up + 1))


@st.composite
def routers(draw: st.DrawFn) -> ExpertsSpec:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    each = draw(st.integers(1 if groups == 1 else 2, 7))
    chosen_groups = draw(st.integers(1, groups))
    shared = draw(st.one_of(st.none(), st.integers(1, 20)))
    return ExpertsSpec(
        groups * each,
        draw(st.integers(1, chosen_groups * each)),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalized=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        router_bias=draw(st.booleans()),
        correction=draw(st.booleans()),
        groups=groups,
        chosen_groups=chosen_groups,
        group_score=draw(st.sampled_from(["best", "two"])),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
    )


@st.composite
def parts(draw: st.DrawFn, activations: tuple[str, ...] = ("silu", "swiglu", *FUNCTIONS)) -> MlpSpec:
    activation = draw(st.sampled_from(activations))
    return MlpSpec(
        draw(st.integers(1, 20)),
        bias=draw(st.booleans()),
        activation=activation,
        gated=activation == "swiglu" or draw(st.booleans()),
        limit=draw(st.sampled_from([math.inf, 0.5])),
        alpha=draw(st.sampled_from([1.702, 1.0])),
        experts=draw(routers()),
    )


@settings(max_examples=300)
@given(parts(), st.integers(1, 20), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1000))
def test_every_token_gets_what_its_experts_make_of_it(mlp: MlpSpec, hidden: int, rows: int, tokens: int, seed: int):
    held = Held(decoder(mlp, hidden), seed)
    x = np.random.default_rng(seed).standard_normal((rows, tokens, hidden), np.float32)
    np.testing.assert_allclose(computed(held, x, Form(8)), expected(held, x), rtol=1e-4, atol=1e-4)


@settings(max_examples=50)
@given(routers(), st.integers(0, 1000))
def test_of_equal_scores_those_of_lower_numbers_are_chosen(experts: ExpertsSpec, seed: int):
    held = Held(decoder(MlpSpec(5, experts=replace(experts, router_bias=False, correction=False)), 6), seed)
    rng = np.random.default_rng(seed)
    router = held.arrays["layers.0.mlp.router.weight"]
    router[:] = 0
    router[:, 0] = rng.integers(-1, 1, len(router))  # one summand, so that equal rows give equal numbers
    x = rng.standard_normal((2, 3, 6), np.float32)
    np.testing.assert_allclose(computed(held, x, Form(8)), expected(held, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
def test_weights_may_differ_by_many_orders(score: str, normalized: bool):
    mlp = MlpSpec(8, experts=ExpertsSpec(6, 4, score=score, normalized=normalized))
    held = Held(decoder(mlp, 4), 0)
    router = held.arrays["layers.0.mlp.router.weight"]
    router[:] = -20 * np.abs(router)  # sigmoids of large numbers would all be 1
    x = np.abs(np.random.default_rng(1).standard_normal((1, 50, 4), np.float32))
    np.testing.assert_allclose(computed(held, x, Form(8)), expected(held, x), rtol=1e-4, atol=1e-4)


def stood_for(array: np.ndarray, scheme: Scheme) -> np.ndarray:
    """What the codes of experts' matrices stand for."""
    return quantize(torch.from_numpy(array).flatten(0, -2), scheme).dequantize().numpy().reshape(array.shape)


@settings(max_examples=60)
@given(
    mlp=parts(activations=("silu", "swiglu", "relu", "gelu_tanh")),
    hidden=st.sampled_from([8, 32, 48, 64]),
    scheme=st.builds(Scheme, st.sampled_from([4, 8]), st.just(32), st.booleans(), st.just("rtn")),
    size=st.sampled_from([4, 7, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_quantized_experts_compute_with_what_their_codes_stand_for(mlp, hidden, scheme, size, seed):
    held = Held(decoder(replace(mlp, size=size), hidden), seed)
    x = np.random.default_rng(seed).standard_normal((2, 3, hidden), np.float32)
    found = computed(held, x, Form(8, scheme=scheme, accuracy_level=1))
    bits_fit = hidden * scheme.bits % 8 == 0 and size * scheme.bits % 8 == 0 and mlp.activation in FUSED[mlp.gated]
    for name, array in held.arrays.items():
        if name.endswith(".weight") and (".shared." in name or (".experts." in name and bits_fit)):
            held.arrays[name] = stood_for(array, scheme)
    # What has no kernel of float32 activations rounds them to eight bits.
    tolerance = 1e-4 if scheme.bits == 4 else 0.05
    wanted = expected(held, x)
    assert np.abs(found - wanted).max() <= tolerance * max(1, np.abs(wanted).max())


FUSED = {True: ("silu", "swiglu"), False: ("silu", "relu", "gelu_tanh")}


def test_no_family_is_refused():
    families = {family.name: family for family in xinfer_model_families()}
    for family, names in SHAPES.items():
        for name in names:
            assert supports(families[family].spec(shape(family, name)), OnnxConfig()) is None
