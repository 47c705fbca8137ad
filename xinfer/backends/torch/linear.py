"""Matrix products and normalizations: what a decoder does to each row by itself."""

__all__ = [
    "ACTIVATIONS",
    "Embedding",
    "ExpertLinear",
    "Joined",
    "Linear",
    "Norm",
    "PerHead",
    "activation",
    "linear_of",
    "make_experts",
    "make_linear",
    "make_norm",
]

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xinfer.backends.torch.codes import Codes, CodesLinear, ExpertCodes, joined
from xinfer.backends.torch.kernels import available
from xinfer.backends.torch.load import Load
from xinfer.models.spec import NormSpec


class Linear(nn.Module):
    """x @ W.T + b, with W as checkpoints have it.

    On a CPU products of a few rows, and of bfloat16 those of any number if the processor adds up products of pairs, are
    this package's own; others oneDNN's, which for float32 torch only calls by this operator: MKL, its choice, is half
    as fast on AMD's processors.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.few, self.packed = few_rows(weight.dtype), False
        weight = weight.contiguous()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def pack(self) -> None:
        """Lay W out as oneDNN likes it, if it can: then enough rows come out alike in any number."""
        self.packed = _packs(self.weight)
        if self.packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, 1)
            self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if x.device.type == "cpu" and not self.packed and available():
            out: Tensor = torch.ops.xinfer.linear(x, self.weight, self.bias, self.few)
            return out
        if self.packed or (x.dtype == torch.float32 and _packs(self.weight)):
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)

    def rows(self, start: int, end: int) -> "Linear":
        """Return what computes some of the outputs, with the same weights."""
        return Linear(self.weight.data[start:end], None if self.bias is None else self.bias.data[start:end])


def few_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows our own products take less time than oneDNN's (two Zen 5 cores, 2026-11-30).

    Of bfloat16 that is where the processor can't add up products of pairs; where it can, see `kernels/tiles.h`.
    """
    return 1 if dtype == torch.float32 else 4


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN can lay out a matrix for this processor; these operators are those that torch.compile uses."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class Joined(nn.Module):
    """Several projections of the same input, one's results behind the other's."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out of all]."""
        return torch.cat([part(x) for part in self.parts], -1)


def make_linear(load: Load, *names: str, bias: bool = False) -> nn.Module:
    """Return the projections of these names as one, one's rows behind the other's, if they are rounded alike."""
    weights, biases = [load(f"{name}.weight") for name in names], [load(f"{name}.bias") for name in names if bias]
    if not isinstance(weights[0], Codes):
        return linear_of(load.join(weights, 0), load.join(biases, 0) if bias else None)
    made: list[nn.Module] = []
    for group in _alike(weights):
        own = biases[group] if bias else []
        made.append(CodesLinear(joined(weights[group], 0, load.join), load.join(own, 0) if own else None))
    return made[0] if len(made) == 1 else Joined(made)


def linear_of(weight: Tensor | Codes, bias: Tensor | None) -> nn.Module:
    """Return what multiplies with a matrix."""
    return CodesLinear(weight, bias) if isinstance(weight, Codes) else Linear(weight, bias)


def make_experts(load: Load, *names: str, bias: bool = False) -> "ExpertLinear | ExpertCodes":
    """Return projections of several experts, those of these names as one."""
    weights = [load(f"experts.{name}.weight") for name in names]
    biases = [load(f"experts.{name}.bias") for name in names if bias]
    own = load.join(biases, 1) if bias else None
    if isinstance(weights[0], Codes):
        return ExpertCodes(joined(weights, 1, load.join), own)
    return ExpertLinear(load.join(weights, 1), own)


def _alike(weights: list[Codes]) -> Iterator[slice]:
    """Yield which matrices, side by side, are rounded alike."""
    start = 0
    for end in range(1, len(weights) + 1):
        if end == len(weights) or not weights[end].fits(weights[start]):
            yield slice(start, end)
            start = end


class Embedding(nn.Module):
    """Rows of a matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, out]."""
        return F.embedding(token_ids, self.weight)

    def head(self, bias: Tensor | None) -> Linear:
        """Return what multiplies with the same matrix."""
        return Linear(self.weight, bias)


class ExpertLinear(nn.Module):
    """Projections of several experts, weight [experts, out, in] and bias [experts, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.contiguous()
        self.few = few_rows(weight.dtype)
        self.weight: nn.Parameter | None = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def each(self) -> Iterator[Linear]:
        """Yield those of one expert after the other; their weights are these."""
        assert self.weight is not None
        for index, weight in enumerate(self.weight.data):
            yield Linear(weight, None if self.bias is None else self.bias.data[index])

    def pack(self) -> None:
        """Leave weights to those of the single experts."""
        self.weight = None

    @property
    def at_once(self) -> bool:
        """Whether there is an operator for all experts together."""
        return self.weight is not None and self.weight.device.type == "cpu" and available()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[T, in] or [T, chosen, in] with the experts' numbers [T, chosen] to [T, chosen, out], if `at_once`."""
        out: Tensor = torch.ops.xinfer.experts(x, self.weight, chosen, self.few)
        return out if self.bias is None else out + self.bias[chosen]

    def times(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[n, in] with each row's expert [n] to [n, out], as one sum over products."""
        assert self.weight is not None
        out = (self.weight[chosen].float() * x.float()[:, None]).sum(-1).to(x.dtype)
        return out if self.bias is None else out + self.bias[chosen]

    def grouped(self, x: Tensor, ends: Tensor, own: Tensor) -> Tensor:
        """[n, in] to [n, out], rows in the order of their experts: `own` [n], of which `ends` has each one's end."""
        assert self.weight is not None
        out: Tensor = F.grouped_mm(x, self.weight.mT, offs=ends)
        return out if self.bias is None else out + self.bias[own]


class PerHead(nn.Module):
    """A matrix for each head, [heads, in, out]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads, in] to [T, heads, out]."""
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


class Norm(nn.Module):
    """A normalization over the last dimension; see `NormSpec`."""

    def __init__(self, spec: NormSpec, width: int, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.spec, self.width = (spec, (width,))
        if weight is not None and spec.offset:
            weight = weight.float() + spec.offset
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x; factors of more than one dimension are those of several heads."""
        if self.weight is None or self.weight.ndim == 1:
            return self._normalize(x, self.weight)
        return self._normalize(x, None) * self.weight

    def _normalize(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return self._normalize(x.to(weight.dtype), weight).to(x.dtype)
        if self.spec.kind == "layer":
            return F.layer_norm(x, self.width, weight, self.bias, self.spec.eps)
        return F.rms_norm(x, self.width, weight, self.spec.eps)


def make_norm(spec: NormSpec | None, load: Load, name: str, width: int) -> nn.Module:
    """Return a normalization of `width` dimensions, or what does nothing where there is none."""
    if spec is None:
        return nn.Identity()
    weight = load(f"{name}.weight") if spec.weight else None
    return Norm(spec, width, weight, load(f"{name}.bias") if spec.bias else None)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of this name, of `MlpSpec.activation`."""
    return ACTIVATIONS[name]
