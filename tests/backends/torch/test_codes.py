"""Matrices in 8 or 4 bits compute what the weights that they stand for would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TOLERANCE, Case, difference, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import needs_operators

from xinfer.backends import BackendContext
from xinfer.backends.torch import CompileConfig, EagerConfig
from xinfer.backends.torch.codes import Codes, CodesEmbedding, CodesLinear, ExpertCodes
from xinfer.backends.torch.compiled import CompiledRunner
from xinfer.backends.torch.quantized import quantized
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Limits
from xinfer.models.quantize import Scheme, quantize
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper

SCHEMES = st.builds(
    Scheme,
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([32, 64, 128]),
    symmetric=st.booleans(),
    method=st.just("rtn"),
    wide_bits=st.just(8),
)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(scheme=SCHEMES, rows=st.integers(1, 9), blocks=st.integers(1, 5), data=st.data())
def test_a_stretch_of_codes_stands_for_a_stretch_of_the_weights(
    scheme: Scheme, rows: int, blocks: int, data: st.DataObject
) -> None:
    shape = (rows, blocks * scheme.block)
    codes = Codes.of(quantize(random(*shape, seed=rows), scheme), shape)
    for dim in (0, 1):
        start = data.draw(st.integers(0, shape[dim] - 1))
        length = data.draw(st.integers(1, shape[dim] - start))
        if dim:
            start, length = start // scheme.block * scheme.block, -(-length // scheme.block) * scheme.block
            length = min(length, shape[dim] - start)
        part = codes.narrow(dim, start, length)
        assert part is not None
        assert torch.equal(part.weights(), codes.weights().narrow(dim, start, length))
    assert codes.narrow(1, 1, scheme.block - 1) is None


@settings(max_examples=60, deadline=None)
@given(
    scheme=SCHEMES,
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    tokens=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_the_weights_that_codes_stand_for(
    scheme: Scheme, rows: int, columns: int, tokens: int, bias: bool, seed: int
) -> None:
    packed = quantize(random(rows, columns, seed=seed), scheme)
    codes = Codes.of(packed, (rows, columns))
    assert torch.equal(codes.weights(), packed.dequantize())
    added = random(rows, seed=seed + 1) if bias else None
    x = random(tokens, columns, seed=seed + 2)
    theirs = torch.nn.functional.linear(
        x.double(), packed.dequantize().double(), None if added is None else added.double()
    )
    module = CodesLinear(codes, added)
    scale = float((x.abs() @ packed.dequantize().abs().T).max()) + 5
    for few in (0, 16, 64):
        module.few = few
        assert float((module(x).double() - theirs).abs().max()) <= 2e-6 * scale
        assert float((module(x.bfloat16()).double() - theirs).abs().max()) <= 2e-2 * scale
    plain = theirs if added is None else theirs - added.double()
    assert float((codes.times(x).double() - plain).abs().max()) <= 2e-6 * scale


@needs_operators
@settings(max_examples=30, deadline=None)
@given(scheme=SCHEMES, columns=st.integers(1, 200), tokens=st.integers(1, 30), seed=st.integers(0, 1000))
def test_experts_products_are_those_of_each_token_with_its_own(
    scheme: Scheme, columns: int, tokens: int, seed: int
) -> None:
    weight = random(5, 12, columns, seed=seed)
    packed = quantize(weight.flatten(0, 1), scheme)
    codes, bias = Codes.of(packed, weight.shape), random(5, 12, seed=seed + 1)
    x, chosen = random(tokens, columns, seed=seed + 2), torch.arange(2 * tokens).view(-1, 2) % 5
    theirs = torch.stack(
        [torch.stack([codes.weights()[e] @ row + bias[e] for e in own]) for row, own in zip(x, chosen, strict=True)]
    )
    experts = ExpertCodes(codes, bias)
    assert experts.at_once
    torch.testing.assert_close(experts(x, chosen), theirs, rtol=1e-4, atol=1e-4)


def test_rows_are_looked_up_as_they_are_multiplied() -> None:
    packed = quantize(random(50, 70, seed=3), Scheme(bits=4, block=32, symmetric=False, method="rtn", wide_bits=4))
    embedding = CodesEmbedding(Codes.of(packed, (50, 70)), torch.float32)
    assert torch.equal(embedding(torch.tensor([7, 3, 7])), packed.dequantize()[[7, 3, 7]])
    assert torch.equal(embedding.head(None).held.weights(), packed.dequantize())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_quantized_model_is_the_model_of_the_rounded_weights(family: str, kind: str, tmp_path: Path) -> None:
    case = Case(tmp_path, shape(family, next(iter(SHAPES[family]))), write=write_reference, max_len=64)
    ours, theirs = (runner_of(case, kind, rounded=rounded) for rounded in (False, True))
    prompt = case.prompt(24)
    tokens, rows = Stepper(ours).greedy(prompt, [20, 3, 1], 6)
    assert difference(rows, Stepper(theirs).greedy(prompt, [24], 6)[1]) <= TOLERANCE
    assert tokens == Stepper(theirs).greedy(prompt, [24], 6)[0]
    assert ours.info.resident_weight_bytes < 0.7 * theirs.info.resident_weight_bytes
    assert ours.info.step_read_bytes < 0.7 * theirs.info.step_read_bytes


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_compiled_steps_compute_with_codes_too(kind: str, tmp_path: Path) -> None:
    case = Case(tmp_path, shape("gpt_oss", next(iter(SHAPES["gpt_oss"]))), write=write_reference, max_len=64)
    eager, compiled = runner_of(case, kind), runner_of(case, kind, CompiledRunner, CompileConfig(device="cpu"))
    rows = [Stepper(runner).greedy(case.prompt(24), [20, 3, 1], 6)[1] for runner in (eager, compiled)]
    assert difference(*rows) <= TOLERANCE


def runner_of(
    case: Case, kind: str, make: type[TorchRunner] = TorchRunner, config: Any = None, *, rounded: bool = False
) -> TorchRunner:
    """Return a runner of the quantized model; or, `rounded`, one in float32 whose weights are what codes stand for."""
    model = model_of(case.folder)
    model.quantization = Scheme.configured(kind)
    if rounded:
        codes = quantized(model, model.quantization, list(model.spec.tensors))
        model.quantization, load = None, model.weights.load
        model.weights.load = lambda name: codes[name].weights() if name in codes else load(name)  # type: ignore[method-assign]
    limits = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, kv_memory=64e6)
    return make(BackendContext(model, config or EagerConfig(device="cpu"), limits))
