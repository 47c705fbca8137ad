"""Weights in 8 or 4 bits, made from a model's own: a property of the model, whatever backend computes with it.

    model.quantization ─► Scheme.of(name, shape) ─► quantize(weight) ─► Packed ─► pack_codes, pack_zeros ─► a kernel

`quantized/` is the opposite, the reading of checkpoints that somebody else quantized. `text` is what all of this, and
whoever rounds something else, is measured and calibrated on.
"""

__all__ = [
    "Gram",
    "Packed",
    "Scheme",
    "Smoothed",
    "pack_codes",
    "pack_zeros",
    "quantize",
    "quantizes",
    "sites",
]

from xinfer.models.quantize.gptq import Gram
from xinfer.models.quantize.packed import Packed, pack_codes, pack_zeros
from xinfer.models.quantize.rounding import quantize
from xinfer.models.quantize.scheme import Scheme, quantizes
from xinfer.models.quantize.smoothing import Smoothed, sites
