"""Rounding compared with formulas number by number, and with an unpacker made from the operator's documentation."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xinfer.errors import ModelError
from xinfer.models.quantize import Gram, Scheme, pack_codes, pack_zeros, quantize

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = [
    Scheme(bits, block, symmetric, method)
    for bits, block, symmetric, method in itertools.product((4, 8), (32, 64, 128), (False, True), ("rtn", "hqq"))
]
schemes = st.sampled_from(SCHEMES)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Small matrices of any width, of sizes far apart, with outliers, blocks of zeros and constants."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 200))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    weight = rng.standard_normal((rows, columns)) * 10.0 ** draw(st.integers(-6, 6))
    kind = draw(st.sampled_from(["plain", "shifted", "outlier", "zeros", "constant"]))
    if kind == "shifted":
        weight += 3 * np.abs(weight).max()
    elif kind == "outlier":
        weight[:, rng.integers(columns)] *= 1e4
    elif kind == "zeros":
        weight[:, : columns // 2] = 0
    elif kind == "constant":
        weight[:] = weight[0, 0]
    return torch.from_numpy(weight.astype(np.float32))


def by_hand(block: list[float], bits: int, symmetric: bool) -> tuple[np.float32, int]:
    """Scale and zero point of round to nearest, of one block."""
    last = 2**bits - 1
    if symmetric:
        least, most = min(block), max(block)
        largest = least if -least >= most else most
        scale, zero = np.float32(largest / -(2 ** (bits - 1))), 2 ** (bits - 1)
    else:
        low, high = min(*block, 0.0), max(*block, 0.0)
        scale = np.float32(np.float32(high / last) - np.float32(low / last))
        zero = 0 if scale == 0 else int(np.rint(np.float32(-low) / scale))
    return (np.float32(1), zero) if scale == 0 else (scale, zero)


def padded(weight: torch.Tensor, block: int) -> np.ndarray:
    filled = np.zeros((weight.shape[0], -(-weight.shape[1] // block) * block), np.float32)
    filled[:, : weight.shape[1]] = weight.numpy()
    return filled


@given(matrices(), schemes.filter(lambda scheme: scheme.method == "rtn"))
def test_round_to_nearest_is_the_formula(weight: torch.Tensor, scheme: Scheme) -> None:
    packed = quantize(weight, scheme)
    for row, numbers in enumerate(padded(weight, scheme.block)):
        for index, block in enumerate(numbers.reshape(-1, scheme.block)):
            scale, zero = by_hand([np.float32(n) for n in block], scheme.bits, scheme.symmetric)
            assert packed.scales[row, index] == scale
            assert packed.zeros is None or packed.zeros[row, index] == zero
            codes = np.clip(np.rint(block / scale) + zero, 0, 2**scheme.bits - 1)
            found = packed.codes[row, index * scheme.block : (index + 1) * scheme.block].numpy()
            np.testing.assert_array_equal(found, codes)


@given(matrices(), schemes)
def test_what_codes_stand_for_is_their_distance_from_zero_in_steps(weight: torch.Tensor, scheme: Scheme) -> None:
    packed = quantize(weight, scheme)
    zeros = torch.full_like(packed.scales, 2 ** (scheme.bits - 1)) if packed.zeros is None else packed.zeros
    shape = (*packed.scales.shape, scheme.block)
    expected = (packed.codes.view(shape).double() - zeros[..., None].double()) * packed.scales[..., None].double()
    found = packed.dequantize()
    assert found.shape == weight.shape and found.dtype == torch.float32
    np.testing.assert_allclose(found, expected.flatten(1)[:, : weight.shape[1]], rtol=1e-6)
    assert bool((expected.flatten(1)[:, weight.shape[1] :] == 0).all()), "padding stands for something"
    assert (packed.block, packed.bits, packed.columns) == (scheme.block, scheme.bits, weight.shape[1])


@given(matrices(), schemes.filter(lambda scheme: scheme.method == "rtn"))
def test_no_weight_is_off_by_more_than_half_a_step(weight: torch.Tensor, scheme: Scheme) -> None:
    """But for what lies beyond the last code: symmetric a whole step, else half of one, as the zero point moved."""
    packed = quantize(weight, scheme)
    steps = packed.scales.abs().repeat_interleave(scheme.block, 1)[:, : weight.shape[1]].double()
    error = (weight.double() - packed.dequantize().double()).abs() / steps
    allowed = 0.5 + 1e-3
    if scheme.symmetric:
        inside = packed.codes[:, : weight.shape[1]] < 2**scheme.bits - 1
        assert float((error * inside).max()) <= allowed
        assert float(error.max()) <= 1 + 1e-3
    else:
        assert float(error.max()) <= 2 * allowed
        ends = (packed.codes == 0) | (packed.codes == 2**scheme.bits - 1)
        assert float((error * ~ends[:, : weight.shape[1]]).max()) <= allowed


@given(matrices(), schemes.filter(lambda scheme: scheme.method == "hqq"))
def test_searching_never_makes_the_squared_error_larger(weight: torch.Tensor, scheme: Scheme) -> None:
    plain = Scheme(scheme.bits, scheme.block, scheme.symmetric, "rtn")

    def errors(found: torch.Tensor) -> np.ndarray:
        squares = (weight.double() - found.double()) ** 2
        return padded(squares.float(), scheme.block).reshape(-1, scheme.block).sum(1)

    searched = errors(quantize(weight, scheme).dequantize())
    rounded = errors(quantize(weight, plain).dequantize())
    noise = padded((weight**2 * 1e-10).float(), scheme.block).reshape(-1, scheme.block).sum(1)
    assert (searched <= rounded * (1 + 1e-4) + noise).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_searching_comes_close_to_the_best_of_all_scales_and_zero_points(symmetric: bool) -> None:
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    found = (quantize(weight, Scheme(4, 32, symmetric, "hqq")).dequantize() - weight).square().sum(1).numpy()
    best = np.full(len(weight), np.inf)
    for zero in [8] if symmetric else range(16):
        for scale in np.concatenate([steps := np.linspace(0.1, 0.6, 400), -steps]):
            codes = np.clip(np.rint(weight.numpy() / scale) + zero, 0, 15)
            best = np.minimum(best, (((codes - zero) * scale - weight.numpy()) ** 2).sum(1))
    assert (found / best).mean() < 1.1


def test_searching_lessens_the_error_of_real_looking_weights() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for symmetric, least in ((False, 0.05), (True, 0.05)):
        error = {
            method: float((quantize(weight, Scheme(4, 32, symmetric, method)).dequantize() - weight).square().mean())
            for method in ("rtn", "hqq")
        }
        assert error["hqq"] < (1 - least) * error["rtn"]


def unpacked(stored: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Numbers of `bits` that lie densely in bytes: number i begins at bit i * bits, counted from the lowest."""
    bits_of = [(int(stored[i * bits // 8]) >> (i * bits % 8)) & (2**bits - 1) for i in range(count)]
    return np.array(bits_of)


@given(matrices(), schemes)
def test_the_operators_layout_can_be_read_by_its_description(weight: torch.Tensor, scheme: Scheme) -> None:
    packed = quantize(weight, scheme)
    rows, blocks = packed.scales.shape
    codes, zeros = pack_codes(packed), pack_zeros(packed)
    assert codes.dtype == torch.uint8 and codes.shape == (rows, blocks, scheme.block * scheme.bits // 8)
    assert (zeros is None) == scheme.symmetric
    assert zeros is None or (zeros.dtype == torch.uint8 and zeros.shape == (rows, -(-blocks * scheme.bits // 8)))
    for row, index in itertools.product(range(rows), range(blocks)):
        found = unpacked(codes[row, index].numpy(), scheme.block, scheme.bits)
        np.testing.assert_array_equal(found, packed.codes[row].view(blocks, -1)[index].numpy())
    for row in range(0 if zeros is None else rows):
        np.testing.assert_array_equal(unpacked(zeros[row].numpy(), blocks, scheme.bits), packed.zeros[row].numpy())
    stored = codes.nbytes + packed.scales.nbytes + (0 if zeros is None else zeros.nbytes)
    assert scheme.nbytes(tuple(weight.shape)) == stored


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
class TestExtremes:
    def test_zeros_stay_zeros(self, scheme: Scheme) -> None:
        assert not quantize(torch.zeros(3, 70), scheme).dequantize().any()

    @pytest.mark.parametrize("value", [1e-3, -2.5, 1e30, -3e38, 1e-44])
    def test_a_constant_is_kept(self, scheme: Scheme, value: float) -> None:
        weight = torch.full((2, scheme.block), value)
        off = (quantize(weight, scheme).dequantize() - weight).abs().max()
        assert float(off) <= 1e-5 * abs(value) + 1e-43

    def test_an_outlier_is_kept_where_nothing_is_searched(self, scheme: Scheme) -> None:
        weight = torch.randn(4, scheme.block, generator=torch.Generator().manual_seed(0))
        weight[0, 7] = 1e6
        found = quantize(weight, scheme).dequantize()
        assert bool(found.isfinite().all())
        assert abs(float(found[0, 7]) / 1e6 - 1) < (1e-5 if scheme.method == "rtn" else 0.1)

    def test_the_widest_numbers_make_nothing_infinite(self, scheme: Scheme) -> None:
        weight = torch.tensor([[3e38, -1e38] * 16, [1e-45, -1e-45] * 16])
        assert bool(quantize(weight, scheme).dequantize().isfinite().all())

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_is_refused_by_name(self, scheme: Scheme, value: float) -> None:
        weight = torch.zeros(5, 40)
        weight[4, 39] = value
        with pytest.raises(ModelError, match=r"'layers\.3\.mlp\.up\.weight' holds NaN or infinity"):
            quantize(weight, scheme, "layers.3.mlp.up.weight")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_depend_on_the_matrix_alone(scheme: Scheme) -> None:
    weight = torch.randn(5000, 100, generator=torch.Generator().manual_seed(3))
    whole, again = quantize(weight, scheme), quantize(weight.clone(), scheme)
    part = quantize(weight[4321:4323], scheme)
    for name in ("codes", "scales", "zeros"):
        found = getattr(whole, name)
        if found is not None:
            assert torch.equal(found, getattr(again, name))
            assert torch.equal(found[4321:4323], getattr(part, name)), "a row's codes depend on others"


@pytest.mark.parametrize("method", ["rtn", "hqq", "gptq"])
def test_a_matrix_may_lie_the_other_way_round(method: str) -> None:
    """As those of gpt2 do in its checkpoints, and still do when their columns are multiplied."""
    weight, inputs = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32))
    scheme, gram = Scheme(4, 32, False, method), Gram(inputs.T @ inputs)
    turned = quantize(weight.T.contiguous().T, scheme, gram=gram)
    expected = quantize(weight, scheme, gram=gram)
    assert torch.equal(turned.codes, expected.codes)
    assert torch.equal(turned.scales, expected.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_type_is_taken(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scheme = Scheme(4, 32, False, "hqq")
    assert torch.equal(quantize(weight, scheme).codes, quantize(weight.float(), scheme).codes)
