"""GPTQ, as AutoGPTQ and GPTQModel write it.

Of a weight [out, in] there are, with b bits: `qweight` int32 [in * b / 32, out], packed along the first axis; `qzeros`
int32 [groups, out * b / 32], packed along the second; `scales` [groups, out]; and mostly `g_idx` int32 [in], the group
of each column, which is not consecutive where columns were quantized in order of activation (`desc_act`). A weight is
scale * (code - zero). The format `gptq` stores zero points less one, modulo 2**b; `gptq_v2` stores them as they are.

Source: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (`pack`, `forward`); GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py (`dequantize_weight`), quantization/config.py (`dynamic`).
"""

__all__ = ["describe", "weights"]

from functools import partial

from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantized._arithmetic import as_bytes, dequantize_rows, group_indices, unpack
from xinfer.models.quantized._config import Config, flag, group_size, integer, matches, text
from xinfer.models.quantized._stored import FLOAT, INDEX, INTS, Quantized, StoredModule, ceil_div, stored_modules
from xinfer.models.weights import Tensors

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def describe(config: Config) -> str:
    """Return what the weights are, for a note."""
    return f"{integer(config, 'bits', _BITS)}-bit GPTQ weights"


def weights(source: Tensors, config: Config) -> dict[str, Quantized]:
    """Return the weights that are stored in this format, by name; see `quantized.dequantized`."""
    if flag(config, "is_marlin_format"):
        raise ModelError("quantization_config: is_marlin_format=true is not supported: take the GPTQ checkpoint itself")
    # AutoGPTQ calls it checkpoint_format, newer GPTQModel `format`.
    key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    offset = 1 if text(config, key, _FORMATS, "gptq") == "gptq" else 0
    text(config, "pack_dtype", ("int32",), "int32")
    for name in ("desc_act", "sym"):  # what they say is in g_idx and qzeros, whatever they are
        flag(config, name)
    found = {}
    for module in stored_modules(source, "qweight"):
        found[f"{module.name}.weight"] = _weight(module, _settings(config, module.name), offset)
    return found


def _settings(config: Config, module: str) -> Config:
    """Return the config of one module: `dynamic` changes it for names that match a pattern, the first one counting."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ModelError(f"quantization_config: dynamic={dynamic!r}, but an object of patterns is expected")
    for pattern, changes in dynamic.items():
        if pattern.startswith("-:"):  # modules that are not quantized, as their tensors show
            continue
        if not isinstance(changes, dict):
            raise ModelError(f"quantization_config: dynamic[{pattern!r}]={changes!r}, but an object is expected")
        if matches(pattern.removeprefix("+:"), module):
            return {**config, **changes}
    return config


def _weight(module: StoredModule, config: Config, offset: int) -> Quantized:
    """Check the shapes of a module's parts."""
    bits, size = integer(config, "bits", _BITS), group_size(config)
    words, out = module.shape("qweight")
    if words * 32 % bits:
        raise ModelError(f"tensor {module.full('qweight')!r} has {words} rows, which are no numbers of {bits} bits")
    width = words * 32 // bits
    size = width if size == -1 else size
    groups = ceil_div(width, size)
    module.expect("scales", (groups, out))
    module.expect("qzeros", (groups, ceil_div(out * bits, 32)))
    if module.has("g_idx"):
        module.expect("g_idx", (width,))
    parts = module.present("qweight", "qzeros", "scales", "g_idx")
    return Quantized((out, width), parts, partial(_load, module, (out, width), bits, size, offset))


def _load(module: StoredModule, shape: tuple[int, int], bits: int, size: int, offset: int) -> Tensor:
    packed = as_bytes(module.read("qweight", INTS).t())
    scales = module.read("scales", FLOAT)
    zeros = unpack(as_bytes(module.read("qzeros", INTS)), bits)[:, : shape[0]]
    # Modulo: a zero point of 0 is stored as the largest number.
    zeros = (zeros + offset) & ((1 << bits) - 1)
    columns: Tensor | int = size
    if module.has("g_idx"):
        columns = group_indices(module.read("g_idx", INDEX), module.full("g_idx"), scales.shape[0], size)

    def codes(first: int, last: int) -> Tensor:
        return unpack(packed[first:last], bits)

    return dequantize_rows(shape, codes, scales.t().contiguous(), zeros.t().contiguous(), columns)
