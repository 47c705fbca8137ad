"""Which kernel computes a kind of attention on a device, and why not a better one."""

__all__ = ["Choice", "Device", "block_size_of", "choose_kernel", "choose_kernels", "note_of"]

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.utils._triton import has_triton

from xinfer.backends.torch.kernels import available
from xinfer.backends.torch.paged import Kernel
from xinfer.models.spec import AttentionSpec, DecoderSpec

# Tokens of a block. FlashAttention 2 takes multiples of 256; of flex_attention's own tiles all divide 128.
_BLOCKS: dict[Kernel, int] = {"cpp": 16, "varlen": 256, "flex": 128, "sdpa": 16}
_NAMES: dict[Kernel, str] = {
    "cpp": "operators in C++",
    "varlen": "varlen_attn",
    "flex": "flex_attention",
    "sdpa": "scaled_dot_product_attention",
}
_LEAST = (8, 0)
_WIDEST, _NARROWEST = 256, 16


@dataclass(frozen=True, slots=True)
class Device:
    """What of a device decides which kernels it has.

    Attributes:
        kind: `cpu` or `cuda`.
        operators: whether there are operators in C++ for it.
        capability: of CUDA, major and minor.
        flash: whether this torch has FlashAttention with block tables for it.
        triton: whether Triton is there, to which torch compiles flex_attention.
    """

    kind: str
    operators: bool = False
    capability: tuple[int, int] = (0, 0)
    flash: bool = False
    triton: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Return what a device has."""
        if device.type == "cpu":
            return cls("cpu", operators=available())
        tables = "block_table" in inspect.signature(varlen_attn).parameters and torch.version.hip is None
        flash = tables and torch.backends.cuda.is_flash_attention_available()
        return cls(device.type, False, torch.cuda.get_device_capability(device), flash, has_triton())


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, and what was against each of those that are better."""

    kernel: Kernel
    reasons: tuple[str, ...] = ()

    @property
    def paged(self) -> bool:
        """Whether it reads the cache where it lies."""
        return self.kernel != "sdpa"

    def __str__(self) -> str:
        name = _NAMES[self.kernel]
        return f"{name} ({'; '.join(self.reasons)})" if self.reasons else name


def choose_kernel(spec: AttentionSpec, dtype: torch.dtype, kept: torch.dtype, device: Device) -> Choice:
    """Return what computes this kind of attention: queries in a precision, keys and values kept in another."""
    if device.kind == "cpu":
        return Choice("cpp") if device.operators else Choice("sdpa", ("operators in C++: there is no compiler",))
    reasons: list[str] = []
    common = list(_against_both(spec, dtype, kept, device))
    kernels: tuple[tuple[Kernel, list[str]], ...] = (
        ("varlen", common + list(_against_varlen(spec, dtype, device))),
        ("flex", common + list(_against_flex(spec, device))),
    )
    for kernel, against in kernels:
        if not against:
            return Choice(kernel, tuple(reasons))
        reasons.append(f"{_NAMES[kernel]}: {against[0]}")
    return Choice("sdpa", tuple(reasons))


def _against_both(spec: AttentionSpec, dtype: torch.dtype, kept: torch.dtype, device: Device) -> Iterator[str]:
    if device.capability < _LEAST:
        yield f"compute capability {_dotted(device.capability)} is below {_dotted(_LEAST)}"
    if kept != dtype:
        yield f"the cache holds {str(kept).removeprefix('torch.')}, not {str(dtype).removeprefix('torch.')}"
    if spec.latent is not None:
        yield "values are a part of the keys"
    if spec.head_dim > _WIDEST:
        yield f"heads are {spec.head_dim} wide, more than {_WIDEST}"


def _against_varlen(spec: AttentionSpec, dtype: torch.dtype, device: Device) -> Iterator[str]:
    if not device.flash:
        yield "this torch has no FlashAttention with block tables"
    if dtype not in (torch.float16, torch.bfloat16):
        yield f"it does not compute in {str(dtype).removeprefix('torch.')}"
    if spec.head_dim % 8:
        yield f"heads are {spec.head_dim} wide, no multiple of 8"
    if spec.softcap is not None:
        yield "it caps no scores"


def _against_flex(spec: AttentionSpec, device: Device) -> Iterator[str]:
    if not device.triton:
        yield "Triton is not there"
    if spec.head_dim < _NARROWEST:
        yield f"heads are {spec.head_dim} wide, less than {_NARROWEST}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def choose_kernels(
    spec: DecoderSpec, dtype: torch.dtype, kept: torch.dtype, device: torch.device
) -> dict[AttentionSpec, Choice]:
    """Return what computes each kind of attention that a model has."""
    found = Device.of(device)
    kinds = dict.fromkeys(layer.attention for layer in spec.layers)
    return {kind: choose_kernel(kind, dtype, kept, found) for kind in kinds}


def block_size_of(choices: Iterable[Choice]) -> int:
    """Return how many tokens a block of the cache has, so that all these kernels can read it."""
    return max(_BLOCKS[choice.kernel] for choice in choices)


def note_of(spec: DecoderSpec, choices: Mapping[AttentionSpec, Choice]) -> str:
    """Return in a line what computes a model's attention, and why nothing better."""
    layers = Counter(str(choices[layer.attention]) for layer in spec.layers)
    if len(layers) == 1:
        return f"attention is computed by {next(iter(layers))}"
    parts = (f"in {count} layers by {choice}" for choice, count in layers.items())
    return f"attention is computed {', '.join(parts)}"
