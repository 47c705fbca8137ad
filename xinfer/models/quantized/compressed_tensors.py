"""compressed-tensors, as LLM Compressor writes it: integers of 4 or 8 bits, or fp8, each with scales for groups.

The format `pack-quantized` has, of a weight [out, in] in b bits: `weight_packed` int32 [out, in * b / 32], packed along
the second axis; `weight_shape`, the two numbers; `weight_scale`; where it is asymmetric `weight_zero_point`, int32
packed along the first axis (int8 as it is for one of the whole tensor, and in old files); where columns were reordered
`weight_g_idx` int32 [in]. Packed numbers are 2**(b - 1) above the signed ones. `int-quantized`, `float-quantized` and
`naive-quantized` have `weight` in int8 or fp8 as it is. Scales are [out, groups] (strategy `group`), [out, 1]
(`channel`), [1] (`tensor`) or one for each block (`block`). A weight is scale * (code - zero).

Which modules are quantized is told by their tensors, so `ignore` need not be obeyed. Activations that are to be
quantized as well are another computation (other numbers come out), so such a config is refused; so is a cache of keys
and values in fp8, sparsity, and rotations of activations (`transform_config`).

Source: compressed-tensors 0.8 to 0.20, compressors/pack_quantized, compressors/naive_quantized,
quantization/lifecycle/forward.py (`dequantize`), quantization/lifecycle/apply.py and utils/match.py (targets).
"""

__all__ = ["describe", "weights"]

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantized._arithmetic import as_bytes, dequantize_rows, fp8_numbers, group_indices, unpack
from xinfer.models.quantized._config import Config, block_size, flag, group_size, integer, matches, text
from xinfer.models.quantized._stored import (
    FLOAT,
    FP8,
    INDEX,
    INT8,
    INTS,
    Quantized,
    StoredModule,
    ceil_div,
    stored_modules,
)
from xinfer.models.quantized.fp8 import block_scales
from xinfer.models.weights import Tensors

# Formats, with the type of number that each is for.
_FORMATS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float", "naive-quantized": None}
_STRATEGIES = ("tensor", "channel", "group", "block")
_CLASSES = {"Linear": False, "Embedding": True}  # class names that targets use: whether it is the embedding
_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How a group of modules is quantized: `kind` is `int` or `float`, `block` the size of a scale's block."""

    packed: bool
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]

    def scale_shapes(self, out: int, width: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that scales may have."""
        if self.strategy == "tensor":
            return (1,), (), (1, 1)
        if self.strategy == "channel":
            return (out, 1), (out,)
        return ((ceil_div(out, self.block[0]), ceil_div(width, self.block[1])),)


def describe(config: Config) -> str:
    """Return what the weights are, for a note."""
    kinds = {f"{scheme.kind}{scheme.bits}" if scheme.kind == "int" else "fp8" for scheme in _schemes(config).values()}
    return f"{' and '.join(sorted(kinds))} weights (compressed-tensors)"


def weights(source: Tensors, config: Config) -> dict[str, Quantized]:
    """Return the weights that are stored in this format, by name; see `quantized.dequantized`.

    The numbers in `weight_shape` are read at once, since shapes can't be told without them.
    """
    schemes = _schemes(config)
    found = {}
    for part in ("weight_packed", "weight_scale"):
        for module in stored_modules(source, part):
            name = f"{module.name}.weight"
            if name not in found:
                scheme = _scheme_of(module.name, schemes)
                found[name] = _packed_weight(module, scheme) if scheme.packed else _plain_weight(module, scheme)
    return found


# --- the config -----------------------------------------------------------------------------------------------------


def _schemes(config: Config) -> dict[str, _Scheme]:
    """Return how modules are quantized, by target; what would be another computation is a `ModelError`."""
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            raise ModelError(f"quantization_config: {name}={config[name]!r} is not supported (supported: none)")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ModelError(f"quantization_config: sparsity_config={sparsity!r} is not supported (supported: dense)")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"quantization_config: config_groups={groups!r}, but an object of groups is expected")
    return {target: scheme for name, group in groups.items() for target, scheme in _group(name, group, config)}


def _group(name: str, group: Any, config: Config) -> Iterator[tuple[str, _Scheme]]:
    """Yield a group's targets with its scheme."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ModelError(f"quantization_config: config_groups.{name}={group!r}, but an object with weights is expected")
    for kind in ("input_activations", "output_activations"):
        if given := group.get(kind):
            what = f"{given.get('type', 'int')}{given.get('num_bits', '')}" if isinstance(given, dict) else repr(given)
            raise ModelError(
                f"quantization_config: config_groups.{name} quantizes activations ({kind}: {what}), which is another "
                "computation and not supported: take a checkpoint with quantized weights only (W4A16, W8A16)"
            )
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"quantization_config: config_groups.{name}.targets={targets!r}, but a list of names is due")
    # A group's own format counts where several are mixed.
    of = group if group.get("format") is not None else config
    scheme = _scheme(group["weights"], text(of, "format", tuple(_FORMATS)))
    yield from ((target, scheme) for target in targets)


def _scheme(args: Config, form: str) -> _Scheme:
    """Return what a group says of its weights."""
    kind = text(args, "type", ("int", "float"), "int")
    if _FORMATS[form] not in (None, kind):
        raise ModelError(f"quantization_config: format={form!r} with weights of type {kind!r} is not supported")
    bits = integer(args, "num_bits", (2, 4, 8) if form == "pack-quantized" else (8,))
    size = -1 if args.get("group_size") is None else group_size(args)
    inferred = "tensor" if args.get("group_size") is None else "channel" if size == -1 else "group"
    strategy = text(args, "strategy", _STRATEGIES, inferred)
    if strategy == "group" and size < 1:
        raise ModelError(f"quantization_config: group_size={size}, but strategy 'group' needs at least 1")
    block = block_size(args, "block_structure") if strategy == "block" else (1, size)
    return _Scheme(form == "pack-quantized", kind, bits, flag(args, "symmetric", True), strategy, size, block)


def _scheme_of(module: str, schemes: dict[str, _Scheme]) -> _Scheme:
    """Return the scheme of a module: of its name, of the first pattern in alphabetical order, or of its class."""
    if len(set(schemes.values())) == 1:
        return next(iter(schemes.values()))
    if module in schemes:
        return schemes[module]
    for target in sorted(schemes):
        if target.startswith("re:") and matches(target.removeprefix("re:"), module):
            return schemes[target]
    for target, embedding in _CLASSES.items():
        if target in schemes and embedding == module.endswith("embed_tokens"):
            return schemes[target]
    raise ModelError(
        f"quantization_config: the tensors of {module!r} are quantized, but no target of config_groups names it "
        f"(targets: {', '.join(sorted(schemes)[:5])})"
    )


# --- tensors --------------------------------------------------------------------------------------------------------


def _packed_weight(module: StoredModule, scheme: _Scheme) -> Quantized:
    """Check the shapes of the parts of a packed weight."""
    rows, words = module.shape("weight_packed")
    module.expect("weight_shape", (2,))
    out, width = (int(number) for number in module.read("weight_shape", INDEX).tolist())
    if width < 1 or (rows, words) != (out, ceil_div(width * scheme.bits, 32)):
        raise ModelError(
            f"tensor {module.full('weight_packed')!r} has the shape {[rows, words]}, but {[out, width]} numbers of "
            f"{scheme.bits} bits, as weight_shape and quantization_config say, need another"
        )
    module.expect("weight_scale", *scheme.scale_shapes(out, width))
    if not scheme.symmetric:
        plain = scheme.scale_shapes(out, width)
        module.expect("weight_zero_point", *plain, *((ceil_div(s[0] * scheme.bits, 32), *s[1:]) for s in plain if s))
    if module.has("weight_g_idx"):
        module.expect("weight_g_idx", (width,))
    names = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", *_ACTIVATIONS)
    return Quantized((out, width), module.present(*names), partial(_load_packed, module, scheme, (out, width)))


def _load_packed(module: StoredModule, scheme: _Scheme, shape: tuple[int, int]) -> Tensor:
    packed = as_bytes(module.read("weight_packed", INTS))
    half = 1 << (scheme.bits - 1)
    zeros: Tensor | float = half
    if not scheme.symmetric:
        stored = module.read("weight_zero_point", (*INTS, *INT8))
        if stored.dtype == torch.int32:
            count = shape[0] if scheme.strategy != "tensor" else 1
            columns = stored.reshape(stored.shape[0], -1).t()
            codes_of_zeros = unpack(as_bytes(columns), scheme.bits)[:, :count].t().float()
        else:
            codes_of_zeros = stored.float() + half
        zeros = _by_row(codes_of_zeros, scheme, shape)

    def codes(first: int, last: int) -> Tensor:
        return unpack(packed[first:last], scheme.bits)[:, : shape[1]]

    scales = _by_row(module.read("weight_scale", FLOAT), scheme, shape)
    return dequantize_rows(shape, codes, scales, zeros, _columns(module, scheme, shape[1], scales.shape[1]))


def _plain_weight(module: StoredModule, scheme: _Scheme) -> Quantized:
    """Check the shapes of the parts of a weight in int8 or fp8."""
    out, width = module.shape("weight")
    module.expect("weight_scale", *scheme.scale_shapes(out, width))
    if not scheme.symmetric:
        module.expect("weight_zero_point", *scheme.scale_shapes(out, width))
    if module.has("weight_g_idx"):
        module.expect("weight_g_idx", (width,))
    names = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", *_ACTIVATIONS)
    return Quantized((out, width), module.present(*names), partial(_load_plain, module, scheme, (out, width)))


def _load_plain(module: StoredModule, scheme: _Scheme, shape: tuple[int, int]) -> Tensor:
    stored = module.read("weight", FP8 if scheme.kind == "float" else INT8)
    zeros: Tensor | float = 0.0
    if not scheme.symmetric:
        zeros = _by_row(module.read("weight_zero_point", (*INT8, *FP8, *FLOAT)).float(), scheme, shape)
    scales = _by_row(module.read("weight_scale", FLOAT), scheme, shape)
    columns = _columns(module, scheme, shape[1], scales.shape[1])

    def codes(first: int, last: int) -> Tensor:
        return stored[first:last] if scheme.kind == "int" else fp8_numbers(stored[first:last])

    return dequantize_rows(shape, codes, scales, zeros, columns)


def _by_row(values: Tensor, scheme: _Scheme, shape: tuple[int, int]) -> Tensor:
    """Return scales or zero points as [out, groups]."""
    if scheme.strategy == "block":
        return block_scales(values, shape, scheme.block)
    return values.reshape(-1, values.shape[1] if values.ndim == 2 else 1).expand(shape[0], -1)


def _columns(module: StoredModule, scheme: _Scheme, width: int, groups: int) -> Tensor | int:
    """Return how columns are grouped, as `dequantize_rows` takes it."""
    size = scheme.block[1] if scheme.strategy in ("group", "block") else width
    if scheme.strategy == "group" and module.has("weight_g_idx"):
        return group_indices(module.read("weight_g_idx", INDEX), module.full("weight_g_idx"), groups, size)
    return size
