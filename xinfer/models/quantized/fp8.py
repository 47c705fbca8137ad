"""fp8 with a scale for each block or each tensor, as DeepSeek-V3, Qwen3-FP8 and AutoFP8 store it.

Of a weight [out, in] there is `weight` in fp8 (e4m3 or e5m2) and `weight_scale_inv` (AutoFP8: `weight_scale`), by which
it is multiplied, whatever the name says: one for each block of `weight_block_size` [rows, columns], the last of which
may be smaller, or one for the whole. Checkpoints say too how activations are to be rounded to fp8
(`activation_scheme`): that is another computation and is not done, as where the hardware has no fp8.

Source: DeepSeek-V3, inference/kernel.py (`weight_dequant_kernel`), README_WEIGHTS.md; transformers,
integrations/finegrained_fp8.py (`Fp8Dequantize`); AutoFP8, auto_fp8/quantize.py.
"""

__all__ = ["block_scales", "describe", "weights"]

from functools import partial

import torch
from torch import Tensor

from xinfer.models.quantized._arithmetic import dequantize_rows, fp8_numbers
from xinfer.models.quantized._config import Config, block_size, text
from xinfer.models.quantized._stored import FLOAT, FP8, Quantized, StoredModule, ceil_div, stored_modules
from xinfer.models.weights import Tensors


def describe(config: Config) -> str:
    """Return what the weights are, for a note."""
    scheme = text(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    return f"fp8 weights (activations are not rounded to fp8, though the checkpoint asks for it: {scheme})"


def weights(source: Tensors, config: Config) -> dict[str, Quantized]:
    """Return the weights that are stored in this format, by name; see `quantized.dequantized`."""
    text(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = None if config.get("weight_block_size") is None else block_size(config, "weight_block_size")
    found = {}
    for scale in ("weight_scale_inv", "weight_scale"):
        for module in stored_modules(source, scale):
            found[f"{module.name}.weight"] = _weight(module, scale, block)
    return found


def _weight(module: StoredModule, scale: str, block: tuple[int, int] | None) -> Quantized:
    """Check the shapes of a module's parts."""
    out, width = module.shape("weight")
    if block is None:
        block = (out, width)
        module.expect(scale, (), (1,), (1, 1))
    else:
        module.expect(scale, (ceil_div(out, block[0]), ceil_div(width, block[1])))
    # Scales of activations are left out, as activations stay what they are.
    parts = module.present("weight", scale, "input_scale", "activation_scale")
    return Quantized((out, width), parts, partial(_load, module, scale, (out, width), block))


def _load(module: StoredModule, scale: str, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    stored, scales = module.read("weight", FP8), module.read(scale, (*FLOAT, torch.float8_e8m0fnu))
    by_row = block_scales(scales, shape, block)
    return dequantize_rows(shape, lambda first, last: fp8_numbers(stored[first:last]), by_row, columns=block[1])


def block_scales(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Return the scales of blocks as those of rows, float32 [out, blocks in a row]; a single one for all is one."""
    by_block = scales.float().reshape(ceil_div(shape[0], block[0]), ceil_div(shape[1], block[1]))
    return by_block.repeat_interleave(block[0], 0)[: shape[0]] if block[0] < shape[0] else by_block.expand(shape[0], -1)
