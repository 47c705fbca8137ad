"""Matrix products and normalizations: what a decoder does to each row by itself."""

__all__ = ["Linear", "Load", "Norm", "PerHead", "activation", "make_linear", "make_norm"]

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xinfer.models.spec import NormSpec

Load = Callable[[str], Tensor]


class Linear(nn.Module):
    """x @ W.T + b; on a CPU with W laid out in blocks by oneDNN, if this build of torch can.

    Laid out so, float32 products of 1, 4 and 32 rows with a 49152 x 576 matrix take 3.9, 6.4 and 12.7 ms on two Zen 4
    cores, where F.linear takes 9.6, 16.3 and 23.6; in bfloat16 2.2, 2.0 and 5.3 instead of 3.3, 3.9 and 7.4.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = packs(weight)
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1) if self.packed else weight
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)


def packs(weight: Tensor) -> bool:
    """Whether oneDNN can lay out a matrix for this processor; these operators are those that torch.compile uses."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def make_linear(load: Load, *names: str, bias: bool = False) -> Linear:
    """Return the projections of these names as one, one's rows behind the other's."""
    weights, biases = [load(f"{name}.weight") for name in names], [load(f"{name}.bias") for name in names if bias]
    if len(names) == 1:
        return Linear(weights[0], biases[0] if bias else None)
    return Linear(torch.cat(weights), torch.cat(biases) if bias else None)


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
            weight, bias = weight.float() + spec.offset, None if bias is None else bias.float()
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


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of this name, of `MlpSpec.activation`."""
    return _ACTIVATIONS[name]
