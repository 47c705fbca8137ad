"""The decoder that a `DecoderSpec` describes, in plain torch.

Written to be read, and to be transformed: what compiles, quantizes or splits a model does so to this one. Shapes: T
tokens of the step, H hidden, Q query heads, G key/value heads, D width of a head, K rows whose logits are wanted.
"""

__all__ = ["Decoder"]

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xinfer.backends.torch.attention import Step
from xinfer.backends.torch.invariant import InvariantStep, Part, silu_by_rows
from xinfer.backends.torch.rotary import Rotary, rotate
from xinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec

Load = Callable[[str], Tensor]


class Linear(nn.Module):
    """x @ W.T + b; on a CPU with W laid out in blocks by oneDNN, if this build of torch can.

    Laid out so, float32 products of 1, 4 and 32 rows with a 49152 x 576 matrix take 3.9, 6.4 and 12.7 ms on two Zen 4
    cores, where F.linear takes 9.6, 16.3 and 23.6; in bfloat16 2.2, 2.0 and 5.3 instead of 3.3, 3.9 and 7.4.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = packs(weight)
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.packed else weight
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


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention, queries, keys and values from one matrix."""

    def __init__(self, spec: AttentionSpec, norm_eps: float, load: Load) -> None:
        super().__init__()
        self.spec = spec
        parts = ("q", "k", "v")
        weight = torch.cat([load(f"{p}.weight") for p in parts])
        bias = torch.cat([load(f"{p}.bias") for p in parts]) if spec.qkv_bias else None
        self.qkv = Linear(weight, bias)
        self.o = Linear(load("o.weight"), load("o.bias") if spec.output_bias else None)
        if spec.qk_norm:
            self.q_norm = RMSNorm(load("q_norm.weight"), norm_eps)
            self.k_norm = RMSNorm(load("k_norm.weight"), norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], pool: Tensor, step: Step | InvariantStep) -> Tensor:
        """[T, H] to [T, H]; keys and values go into `pool`."""
        q_heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv = self.qkv(x).view(len(x), q_heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self.spec.qk_norm:
            qk = torch.cat([self.q_norm(qk[:, :q_heads]), self.k_norm(qk[:, q_heads:])], 1)
        qk = rotate(qk, *rotation)
        kv = torch.cat([qk[:, q_heads:], v], 1)
        pool.index_copy_(0, step.slots, kv.flatten(1))
        out: Tensor = self.o(step.attend(qk[:, :q_heads], kv, pool, self.spec))
        return out


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, bias: bool, silu: Callable[[Tensor], Tensor], load: Load) -> None:
        super().__init__()
        self.silu = silu
        parts = ("gate", "up")
        merged = torch.cat([load(f"{p}.bias") for p in parts]) if bias else None
        self.gate_up = Linear(torch.cat([load(f"{p}.weight") for p in parts]), merged)
        self.down = Linear(load("down.weight"), load("down.bias") if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(self.silu(gate) * up)
        return out


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: LayerSpec, norm_eps: float, silu: Callable[[Tensor], Tensor], load: Load) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(load("attn_norm.weight"), norm_eps)
        self.attn = Attention(spec.attention, norm_eps, lambda name: load(f"attn.{name}"))
        self.mlp_norm = RMSNorm(load("mlp_norm.weight"), norm_eps)
        self.mlp = Mlp(spec.mlp.bias, silu, lambda name: load(f"mlp.{name}"))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], pool: Tensor, step: Step | InvariantStep) -> Tensor:
        """[T, H] to [T, H]."""
        x = x + self.attn(self.attn_norm(x), rotation, pool, step)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Token ids to logits.

    Args:
        spec: what to build.
        load: returns a weight by canonical name, on the device and in the precision to compute in.
        invariant: compute each row in a way that does not depend on how many there are.
    """

    def __init__(self, spec: DecoderSpec, load: Load, invariant: bool = False) -> None:
        super().__init__()
        self.spec = spec
        silu = silu_by_rows if invariant else F.silu
        self.layers = nn.ModuleList(
            Layer(layer, spec.norm_eps, silu, lambda name, i=i: load(f"layers.{i}.{name}"))  # type: ignore[misc]
            for i, layer in enumerate(spec.layers)
        )
        self.norm = RMSNorm(load("norm.weight"), spec.norm_eps)
        self.embed = nn.Parameter(load("embed.weight"), requires_grad=False)
        self.head = Linear(self.embed if spec.tied else load("head.weight"))
        ropes = dict.fromkeys(layer.attention.rope for layer in spec.layers)
        self._rotary = {rope: Rotary(rope, self.embed.dtype, self.embed.device) for rope in ropes}

    def forward(self, token_ids: Tensor, positions: Tensor, pools: list[Tensor], step: Step | InvariantStep) -> Tensor:
        """Return float32 logits [K, vocabulary] of the tokens `step.sample_at`; ids and positions are [T]."""
        x = F.embedding(token_ids, self.embed)
        rotations = {rope: rotary.at(positions, step.longest) for rope, rotary in self._rotary.items()}
        for layer, spec, pool in zip(self.layers, self.spec.layers, pools, strict=True):
            x = layer(x, rotations[spec.attention.rope], pool, step)
        if step.sample_at is not None:
            x = x.index_select(0, step.sample_at)
        logits: Tensor = self.head(self.norm(x)).float()
        return logits

    def parts(self) -> Iterator[Part]:
        """Yield what computes rows by themselves, each kind of layer once."""
        hidden, kinds = self.spec.hidden_size, dict(zip(self.spec.layers, self.layers, strict=True))
        for spec, layer in kinds.items():
            assert isinstance(layer, Layer)
            yield Part("norm", hidden, layer.attn_norm)
            yield Part("qkv", hidden, layer.attn.qkv)
            yield Part("output", spec.attention.heads * spec.attention.head_dim, layer.attn.o)
            yield Part("mlp", hidden, layer.mlp)
