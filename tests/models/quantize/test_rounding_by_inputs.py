"""Rounding by what comes of it, compared with the same done in float64 from definitions, without any shortcut."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xinfer.models.quantize import Gram, Scheme, quantize
from xinfer.models.quantize.gptq import _codes, _fitted, propagated

Choose = Callable[[int, Tensor], Tensor]  # what a column of numbers becomes

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = [
    Scheme(bits, block, symmetric, "gptq")
    for bits, block, symmetric in itertools.product((4, 8), (32, 64), (False, True))
]
KINDS = ("independent", "correlated", "deficient", "dead", "outlier", "zero")


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


def inputs(kind: str, width: int, rng: np.random.Generator) -> Tensor:
    """What a matrix multiplies, [tokens, width] in float64."""
    x = drawn(rng, 4 * width, width)
    if kind == "correlated":
        x = x @ drawn(rng, width, width) * drawn(rng, width).exp()
    elif kind == "deficient":
        x = x[:, : max(1, width // 4)] @ drawn(rng, max(1, width // 4), width)
    elif kind == "dead":
        x[:, rng.random(width) < 0.3] = 0
    elif kind == "outlier":
        x[:, rng.integers(width)] *= 1e4
    return x * 0 if kind == "zero" else x


def gram_of(x: Tensor) -> Gram:
    return Gram((x.T @ x / len(x)).float())


def errors(difference: Tensor, gram: Gram) -> Tensor:
    """e G e' of each row."""
    return ((difference.double() @ gram.matrix.double()) * difference.double()).sum(1)


def wide(each: Tensor, block: int, columns: int) -> Tensor:
    """[n, blocks] to [n, columns]."""
    return each.repeat_interleave(block, 1)[:, :columns]


def start(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, in], scales and zero points [n, blocks] of round to nearest."""
    packed = quantize(weight, Scheme(scheme.bits, scheme.block, scheme.symmetric, "rtn"))
    zeros = torch.full_like(packed.scales, 1 << scheme.bits - 1) if packed.zeros is None else packed.zeros.float()
    return packed.codes[:, : weight.shape[1]].float(), packed.scales, zeros


# Never worse


@given(
    st.sampled_from(KINDS),
    st.sampled_from(SCHEMES),
    st.integers(1, 4),
    st.integers(1, 140),
    st.sampled_from([1e-8, 1e-3, 1.0, 1e3, 1e8]),
    st.integers(0, 1 << 30),
)
def test_no_row_is_off_by_more_than_before(
    kind: str, scheme: Scheme, rows: int, columns: int, size: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    gram = gram_of(inputs(kind, columns, rng) * size)
    weight = drawn(rng, rows, columns).float()
    codes, scales, zeros = start(weight, scheme)

    def off(codes: Tensor, scales: Tensor) -> Tensor:
        steps = codes.double() - wide(zeros, scheme.block, columns)
        return weight.double() - steps * wide(scales.double(), scheme.block, columns)

    found, fitted = propagated(weight, codes, scales, zeros, gram, scheme.block, (1 << scheme.bits) - 1)
    assert found.min() >= 0 and found.max() < 1 << scheme.bits and torch.equal(found, found.round())
    assert bool(fitted.isfinite().all() and (fitted != 0).all())
    before, after = off(codes, scales), off(found, fitted)
    sizes = before.abs() @ gram.matrix.double().abs()  # what float32 loses is a part of these
    noise = ((1e-6 * before.abs() + 5e-7 * weight.abs()) * sizes).sum(1)
    assert bool((errors(after, gram) <= errors(before, gram) + noise).all())


# The same by definition


def by_elimination(weight: Tensor, choose: Choose, order: list[int], g: Tensor) -> None:
    """Optimal brain quantization: what is left takes over each error by G's inverse, of which the column then goes."""
    weight, inverse = weight.clone(), torch.linalg.inv(g)
    for column in order:
        error = weight[:, column] - choose(column, weight[:, column])
        weight -= torch.outer(error, inverse[column] / inverse[column, column])
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]


def by_least_squares(weight: Tensor, choose: Choose, order: list[int], g: Tensor) -> None:
    """Before each column, all that is left is put where the error of everything, as it then is, would be least."""
    error = torch.zeros_like(weight)
    for index, column in enumerate(order):
        done, left = order[:index], order[index:]
        made_up = torch.linalg.solve(g[left][:, left], g[left][:, done] @ error[:, done].T)
        error[:, column] = weight[:, column] - choose(column, weight[:, column] + made_up[0])


@pytest.mark.parametrize("reference", [by_elimination, by_least_squares])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("width", "kind"),
    [
        (1, "independent"),
        (2, "correlated"),
        (7, "deficient"),
        (16, "dead"),
        (24, "correlated"),
        (24, "outlier"),
        (64, "correlated"),
        (150, "correlated"),
        (150, "deficient"),
    ],
)
def test_each_column_is_rounded_once_those_before_it_were_made_up_for(
    reference: Callable, bits: int, width: int, kind: str
) -> None:
    rng = np.random.default_rng(width + bits)
    gram = gram_of(inputs(kind, width, rng))
    weight, top = drawn(rng, 60, width).float(), (1 << bits) - 1
    _, scales, zeros = (wide(each, 32, width) for each in start(weight, Scheme(bits, 32, False)))
    scales = scales * 0.9  # so that some are cut
    found = _codes(weight, scales, zeros, gram, top)
    expected, clear = torch.full_like(found, -1), torch.ones(len(found), dtype=torch.bool)

    def choose(column: int, numbers: Tensor) -> Tensor:
        exact = numbers / scales[:, column].double()
        code = (exact.round() + zeros[:, column]).clamp(0, top)
        clear[(exact % 1 - 0.5).abs() < 1e-3] = False
        expected[:, column] = code.float()
        return (code - zeros[:, column]) * scales[:, column].double()

    order = np.argsort(-gram.squares.numpy(), kind="stable").tolist()
    reference(weight.double(), choose, order, gram.matrix.double())
    assert clear.float().mean() > 0.5
    assert torch.equal(found[clear], expected[clear])


@pytest.mark.parametrize(("columns", "block"), [(32, 32), (96, 32), (70, 32), (200, 64)])
def test_scales_come_to_where_the_error_is_least(columns: int, block: int) -> None:
    rng = np.random.default_rng(columns)
    gram = gram_of(inputs("independent", columns, rng) + inputs("correlated", columns, rng) / columns)
    weight = drawn(rng, 9, columns).float()
    codes, scales, zeros = start(weight, Scheme(4, block, False))
    steps, g = codes - wide(zeros, block, columns), gram.matrix.double()
    fitted, last = scales * 1.3, torch.full((9,), torch.inf)
    for _ in range(60 if columns > block else 1):  # a single scale is found at once
        fitted = _fitted(weight, steps, fitted, gram, block)
        off = weight - steps * wide(fitted, block, columns)
        now = errors(off, gram)
        assert bool((now <= last * (1 + 1e-5)).all())
        last = now
    for row in range(len(weight)):
        parts = torch.zeros(columns, scales.shape[1], dtype=torch.float64)  # what each scale is multiplied by
        for column in range(columns):
            parts[column, column // block] = steps[row, column]
        root = torch.linalg.cholesky(g).T  # e G e' is the square of root @ e
        best = torch.linalg.lstsq(root @ parts, root @ weight[row].double()).solution
        np.testing.assert_allclose(fitted[row], best, rtol=1e-4)
        slope, size = (parts.T @ g @ each[row].double() for each in (off, weight))
        assert slope.abs().max() <= 1e-4 * size.abs().max()


# Whole matrices


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_of_correlated_inputs_much_less_is_lost(scheme: Scheme) -> None:
    rng = np.random.default_rng(0)
    mixed = drawn(rng, 1000, 20) @ drawn(rng, 20, 160) + 0.3 * drawn(rng, 1000, 160)
    gram, weight = gram_of(mixed), drawn(rng, 64, 160).float()
    error = {
        method: float(errors(weight - quantize(weight, how, gram=gram).dequantize(), gram).mean())
        for method in ("rtn", "hqq", "gptq")
        for how in [Scheme(scheme.bits, scheme.block, scheme.symmetric, method)]
    }
    assert error["gptq"] < 0.7 * min(error["rtn"], error["hqq"])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_without_inputs_it_is_the_search_for_the_least_squared_error(scheme: Scheme) -> None:
    weight = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    found = quantize(weight, scheme)
    searched = quantize(weight, Scheme(scheme.bits, scheme.block, scheme.symmetric, "hqq"))
    assert torch.equal(found.codes, searched.codes) and torch.equal(found.scales, searched.scales)
    assert scheme.symmetric or torch.equal(found.zeros, searched.zeros)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("columns", [1, 33, 100])
def test_padding_stands_for_nothing(scheme: Scheme, columns: int) -> None:
    rng = np.random.default_rng(columns)
    weight = drawn(rng, 5, columns).float()
    packed = quantize(weight, scheme, gram=gram_of(inputs("correlated", columns, rng)))
    zeros = torch.full_like(packed.scales, 1 << scheme.bits - 1) if packed.zeros is None else packed.zeros
    filling = packed.codes.shape[1] - columns
    assert 0 < filling < scheme.block
    assert bool((packed.codes[:, columns:] == zeros[:, -1:]).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_depends_on_no_other(scheme: Scheme) -> None:
    """But for noise of sums whose order is the library's: a number beside a tie may fall to either side."""
    rng = np.random.default_rng(0)
    weight = drawn(rng, 40, 100).float()
    gram = gram_of(inputs("correlated", 100, rng))
    whole = quantize(weight, scheme, gram=gram)
    alone = [quantize(weight[row : row + 1], scheme, gram=gram) for row in range(40)]
    same = [torch.equal(whole.codes[row], each.codes[0]) for row, each in enumerate(alone)]
    assert np.mean(same) > 0.9
    for row in np.flatnonzero(same).tolist():
        np.testing.assert_allclose(whole.scales[row], alone[row].scales[0], rtol=1e-4)
        assert whole.zeros is None or torch.equal(whole.zeros[row], alone[row].zeros[0])
        np.testing.assert_allclose(whole.dequantize()[row], alone[row].dequantize()[0], rtol=1e-4, atol=1e-6)
    stand_for = whole.dequantize(), torch.cat([each.dequantize() for each in alone])
    off, off_alone = (errors(weight - each, gram) for each in stand_for)
    np.testing.assert_allclose(off, off_alone, rtol=0.2)


# What inputs may be


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_inputs_that_are_always_zero_count_as_alike(scheme: Scheme) -> None:
    weight = torch.randn(20, 90, generator=torch.Generator().manual_seed(0))
    found = quantize(weight, scheme, gram=Gram(torch.zeros(90, 90)))
    plain = quantize(weight, Scheme(scheme.bits, scheme.block, scheme.symmetric, "hqq"))
    off, plainly = ((each.dequantize() - weight).double().square().sum(1) for each in (found, plain))
    assert bool((off <= plainly * (1 + 1e-5)).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_an_input_that_never_comes_keeps_its_weights_all_the_same(scheme: Scheme) -> None:
    rng = np.random.default_rng(0)
    x = inputs("correlated", 96, rng)
    x[:, [3, 40]] = 0
    x[:, 64:] = 0  # of a 32-wide block or a 64-wide one, all or what comes last
    weight = drawn(rng, 50, 96).float()
    gram = gram_of(x)
    assert set(gram.order[-34:].tolist()) == {3, 40, *range(64, 96)}
    found = quantize(weight, scheme, gram=gram)
    steps = found.scales.abs().repeat_interleave(scheme.block, 1)[:, :96]
    off = (found.dequantize() - weight).abs() / steps
    assert float(off[:, [3, 40, *range(64, 96)]].median()) < 0.3
    assert float(off[:, [3, 40, *range(64, 96)]].mean()) < 0.5


def test_a_matrix_that_noise_made_indefinite_is_taken() -> None:
    mean = torch.tensor([[1.0, 1.2], [1.2, 1.0]])
    weight = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    gram = Gram(mean)
    assert bool(gram.passing.isfinite().all())
    assert bool(quantize(weight, Scheme(4, 32, False, "gptq"), gram=gram).dequantize().isfinite().all())
