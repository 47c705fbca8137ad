"""MXFP4, as gpt-oss has it for its experts: numbers of four bits, 32 of which share a power of two.

Of the experts' weights [E, in, out] there are `*_blocks` uint8 [E, out, in / 32, 16] and `*_scales` uint8
[E, out, in / 32]. A byte holds two numbers, that of the lower column in its low nibble; a nibble is a sign, two bits of
exponent and one of mantissa. A scale s means 2**(s - 127); 255 would be NaN and is refused.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1; the order of nibbles and axes is that
of gpt-oss, gpt_oss/torch/weights.py (`_get_mxfp4_tensor`), and of transformers, integrations/mxfp4.py
(`convert_moe_packed_tensors`), which also says in which order of axes the experts are held.
"""

__all__ = ["describe", "weights"]

from functools import partial

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.quantized._config import Config
from xinfer.models.quantized._stored import BYTES, Quantized, StoredModule, stored_modules
from xinfer.models.weights import Tensors

_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NIBBLES = torch.cat([_NUMBERS, -_NUMBERS])
_LOW, _HIGH = _NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)  # the two numbers of each byte
_SCALES = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(-127, 128)).float()
_PIECE = 1 << 18  # numbers dequantized at a time, so that they stay in the caches


def describe(config: Config) -> str:
    """Return what the weights are, for a note."""
    return "MXFP4 experts"


def weights(source: Tensors, config: Config) -> dict[str, Quantized]:
    """Return the weights that are stored in this format, by name; see `quantized.dequantized`."""
    return {module.name: _weight(module) for module in stored_modules(source, "blocks", "_")}


def _weight(module: StoredModule) -> Quantized:
    """Check the shapes of a weight's parts."""
    experts, out, groups, size = module.shape("blocks", 4)
    if size != 16:
        module.expect("blocks", (experts, out, groups, 16))
    module.expect("scales", (experts, out, groups))
    shape = (experts, groups * 32, out)
    return Quantized(shape, module.present("blocks", "scales"), partial(_load, module, shape))


def _load(module: StoredModule, shape: tuple[int, int, int]) -> Tensor:
    experts, _, out = shape
    blocks, scales = module.read("blocks", BYTES), module.read("scales", BYTES)
    if bool((scales == 255).any()):
        raise ModelError(f"tensor {module.full('scales')!r} holds a scale of NaN (255): the file is damaged")
    result = torch.empty(shape)
    step = max(1, _PIECE // (32 * out))  # groups
    for expert in range(experts):
        # Bytes are put in the result's order of axes, of which there are an eighth, instead of numbers.
        packed = blocks[expert].reshape(out, -1).t().contiguous()
        factors = _SCALES.index_select(0, scales[expert].t().reshape(-1).int()).view(-1, 1, out)
        for first in range(0, len(factors), step):
            last = min(first + step, len(factors))
            codes, numbers = packed[first * 16 : last * 16].flatten().int(), result[expert, first * 32 : last * 32]
            numbers[0::2] = _LOW.index_select(0, codes).view(-1, out)
            numbers[1::2] = _HIGH.index_select(0, codes).view(-1, out)
            numbers.view(-1, 32, out).mul_(factors[first:last])
    return result
