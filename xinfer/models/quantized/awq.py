"""AWQ, as AutoAWQ writes it in its version "gemm".

Of a weight [out, in] there are `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8] and `scales`
[groups, out], for groups of consecutive rows of the input. A word holds eight outputs, not in order: its nibbles, the
lowest first, are those of 0, 2, 4, 6, 1, 3, 5, 7. A weight is scale * (code - zero).

Source: AutoAWQ, awq/utils/packing_utils.py (`dequantize_gemm`), awq/models/_config.py (names of fields).
"""

__all__ = ["describe", "weights"]

from functools import partial

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantized._arithmetic import dequantize_rows
from xinfer.models.quantized._config import Config, flag, group_size, integer, text
from xinfer.models.quantized._stored import FLOAT, INTS, Quantized, StoredModule, ceil_div, stored_modules
from xinfer.models.weights import Tensors

# Where in a word the outputs 0 to 7 lie: the inverse of the order above, in bits.
_SHIFTS = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32)[:, None] * 4


def describe(config: Config) -> str:
    """Return what the weights are, for a note."""
    return f"{integer(_renamed(config), 'bits', (4,))}-bit AWQ weights"


def _renamed(config: Config) -> Config:
    """Return a config in today's words: AutoAWQ's own file calls them w_bit and q_group_size."""
    old = {"bits": "w_bit", "group_size": "q_group_size"}
    return {**{new: config.get(name) for new, name in old.items()}, **config}


def weights(source: Tensors, config: Config) -> dict[str, Quantized]:
    """Return the weights that are stored in this format, by name; see `quantized.dequantized`."""
    config = _renamed(config)
    text(config, "version" if config.get("version") is not None else "format", ("gemm",), "gemm")
    integer(config, "bits", (4,))
    if not flag(config, "zero_point", default=True):
        raise ModelError("quantization_config: zero_point=false is not supported in AWQ (supported: true)")
    size = group_size(config)
    return {f"{module.name}.weight": _weight(module, size) for module in stored_modules(source, "qweight")}


def _weight(module: StoredModule, size: int) -> Quantized:
    """Check the shapes of a module's parts."""
    width, words = module.shape("qweight")
    size = width if size == -1 else size
    groups = ceil_div(width, size)
    module.expect("qzeros", (groups, words))
    module.expect("scales", (groups, words * 8))
    parts = module.present("qweight", "qzeros", "scales")
    return Quantized((words * 8, width), parts, partial(_load, module, (words * 8, width), size))


def _load(module: StoredModule, shape: tuple[int, int], size: int) -> Tensor:
    packed, zeros = (module.read(part, INTS).t().contiguous() for part in ("qweight", "qzeros"))
    scales = module.read("scales", FLOAT).t().contiguous()

    def codes(first: int, last: int) -> Tensor:
        return _unpack(packed[first // 8 : last // 8])

    return dequantize_rows(shape, codes, scales, _unpack(zeros), size)


def _unpack(words: Tensor) -> Tensor:
    """Return the codes [8 * n, columns] of words [n, columns]."""
    return ((words[:, None] >> _SHIFTS) & 15).flatten(0, 1)
