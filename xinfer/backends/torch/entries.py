"""What a token leaves in a layer's cache: keys and values as they are, or as codes of eight bits.

The keys and the values of each head of each token are rounded by themselves: their largest absolute value becomes the
largest code (127 of int8, 448 of fp8, which is float8_e4m3fn). So no text has to be seen before, and what a token
leaves depends on no other. An entry of codes has float32 scales first, of all heads' keys and then of their values,
then the codes in the same order, and zeros up to a multiple of four bytes.
"""

__all__ = ["KV_DTYPES", "as_kept", "decode_entries", "encode_entries", "entry_bytes", "store"]

import torch
import torch.nn.functional as F
from torch import Tensor

from xinfer.backends.torch.kernels import available
from xinfer.models.spec import AttentionSpec

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SCALE = torch.float32.itemsize


def entry_bytes(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Return what a token leaves in one layer's cache of this precision."""
    if dtype not in _LARGEST:
        return spec.cache_width * dtype.itemsize
    return -(-(_scale_bytes(spec) + spec.cache_width) // _SCALE) * _SCALE


def store(entries: Tensor, slots: Tensor, pool: Tensor, spec: AttentionSpec) -> None:
    """Write keys and values [T, cache_width] to their slots [T] of a cache."""
    if pool.dtype in _LARGEST:  # written as bytes: torch has no such operator for fp8
        entries, pool = encode_entries(entries, spec.head_dim, pool.dtype).view(torch.int8), pool.view(torch.int8)
    pool.index_copy_(0, slots, entries)


def as_kept(entries: Tensor, pool: Tensor, spec: AttentionSpec) -> Tensor:
    """Return keys and values [T, cache_width] as they are read back from a cache."""
    if pool.dtype not in _LARGEST:
        return entries
    return decode_entries(encode_entries(entries, spec.head_dim, pool.dtype), spec, entries.dtype)


def encode_entries(entries: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return numbers [T, N] as entries of codes, every `dim` of them with a scale; what is no number stays none."""
    if entries.device.type == "cpu" and available():
        coded: Tensor = torch.ops.xinfer.encode_entries(entries, dim, dtype)
        return coded
    heads = entries.float().view(entries.shape[0], -1, dim)
    scales = (heads.abs().amax(-1, keepdim=True) / _LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (heads / scales).flatten(1)
    whole = codes.round().to(dtype) if dtype == torch.int8 else codes.to(dtype)
    parts = torch.cat([scales.flatten(1).view(torch.int8), whole.view(torch.int8)], 1)
    return F.pad(parts, (0, -parts.shape[1] % _SCALE)).view(dtype)


def decode_entries(entries: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """Return keys and values [..., cache_width] of entries, in the precision to compute in."""
    if entries.dtype not in _LARGEST:
        return entries
    first = _scale_bytes(spec)
    scales = entries[..., :first].view(torch.float32)
    codes = entries[..., first : first + spec.cache_width].float()
    return (codes.view(*scales.shape, spec.head_dim) * scales[..., None]).flatten(-2).to(dtype)


def _scale_bytes(spec: AttentionSpec) -> int:
    return spec.cache_width // spec.head_dim * _SCALE
