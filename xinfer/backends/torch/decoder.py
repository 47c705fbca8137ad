"""The decoder that a `DecoderSpec` describes, in plain torch.

Written to be read, and to be transformed: what compiles, quantizes or splits a model does so to this one. Shapes: T
tokens of the step, H hidden, Q query heads, G key/value heads, D width of a head, K rows whose logits are wanted.
"""

__all__ = ["AnyStep", "Decoder", "Turns"]

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xinfer.backends.torch.attention import Step
from xinfer.backends.torch.codes import Codes, CodesEmbedding, CodesLinear, ExpertCodes
from xinfer.backends.torch.entries import store
from xinfer.backends.torch.invariant import InvariantStep, Padding, Part, by_rows
from xinfer.backends.torch.lane import Lane
from xinfer.backends.torch.linear import (
    Embedding,
    ExpertLinear,
    Linear,
    Norm,
    PerHead,
    linear_of,
    make_linear,
    make_norm,
)
from xinfer.backends.torch.load import Load
from xinfer.backends.torch.mlp import Elementwise, Experts, make_mlp
from xinfer.backends.torch.paged import PagedStep
from xinfer.backends.torch.rotary import Rotary, Turn, grow, rotate, rotate_and_store
from xinfer.backends.torch.streaming import LayerStream
from xinfer.models.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, RopeSpec

AnyStep = Step | PagedStep | InvariantStep
Turns = dict[RopeSpec, Turn]


class Attention(nn.Module):
    """Grouped-query attention, queries, keys and values from one matrix."""

    def __init__(self, spec: AttentionSpec, load: Load) -> None:
        super().__init__()
        self.spec = spec
        self.qkv = make_linear(load, "q", "k", "v", bias=spec.qkv_bias)
        self.o = make_linear(load, "o", bias=spec.output_bias)
        self.sinks = nn.Parameter(load("sinks"), requires_grad=False) if spec.sinks else None
        if spec.qk_norm is not None:
            over_all = spec.qk_norm_over == "all"
            self.q_norm = make_norm(spec.qk_norm, load, "q_norm", spec.head_dim * (spec.heads if over_all else 1))
            self.k_norm = make_norm(spec.qk_norm, load, "k_norm", spec.head_dim * (spec.kv_heads if over_all else 1))

    def forward(self, x: Tensor, turn: Turn | None, pool: Tensor, step: AnyStep) -> Tensor:
        """[T, H] to [T, H]; keys and values go into `pool`."""
        q_heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv = self.qkv(x).view(x.shape[0], q_heads + 2 * kv_heads, dim)
        if turn is not None and isinstance(step, PagedStep) and self._just_turned and step.turns(self.spec, pool, x):
            q = rotate_and_store(qkv, turn, step.slots, pool, kv_heads)
            return self._output(step.attend(q, qkv, pool, self.spec, self.sinks))
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self.spec.qk_norm_turned:
            qk = rotate(qk, turn)
        if self.spec.qk_norm is not None:
            qk = torch.cat([self._normed(self.q_norm, qk[:, :q_heads]), self._normed(self.k_norm, qk[:, q_heads:])], 1)
        if (most := self.spec.clip) is not None:
            qk, v = qk.clamp(-most, most), v.clamp(-most, most)
        if not self.spec.qk_norm_turned:
            qk = rotate(qk, turn)
        kv = torch.cat([qk[:, q_heads:], v], 1).flatten(1)
        store(kv, step.slots, pool, self.spec)
        return self._output(step.attend(grow(qk[:, :q_heads], turn), kv, pool, self.spec, self.sinks))

    @property
    def _just_turned(self) -> bool:
        """Whether nothing but their turn is between the projections and what is cached."""
        return self.spec.qk_norm is None and self.spec.clip is None

    def _output(self, attended: Tensor) -> Tensor:
        out: Tensor = self.o(attended)
        return out

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """[T, heads, D], all heads of a token as one vector where that is what is normalized."""
        out: Tensor = norm(x.flatten(1)).view(x.shape) if self.spec.qk_norm_over == "all" else norm(x)
        return out

    def parts(self, hidden: int) -> Iterator[Part]:
        """Yield what computes rows by themselves."""
        yield Part("qkv", hidden, self.qkv)
        yield Part("output", self.spec.output_dim, self.o)


class LatentAttention(nn.Module):
    """Attention to one cached vector a token, from which the keys and values of all heads could be made.

    They are not: with k = K c, q . k is (q K) . c. So queries are multiplied, not keys; and results, not values.
    """

    def __init__(self, spec: AttentionSpec, latent: LatentSpec, load: Load) -> None:
        super().__init__()
        self.spec, self.latent = spec, latent
        if latent.q_rank is not None:
            self.q_a = make_linear(load, "q_a", bias=spec.qkv_bias)
            self.q_a_norm = make_norm(latent.norm, load, "q_a_norm", latent.q_rank)
        self.q = make_linear(load, "q" if latent.q_rank is None else "q_b")
        self.kv_a = make_linear(load, "kv_a", bias=spec.qkv_bias)
        self.kv_a_norm = make_norm(latent.norm, load, "kv_a_norm", latent.rank)
        k_b, v_b = (load.join([load(f"{name}.weight")], 0).view(spec.heads, -1, latent.rank) for name in ("k_b", "v_b"))
        self.k_b, self.v_b = PerHead(k_b), PerHead(v_b.transpose(1, 2))  # [Q, nope, rank], [Q, rank, value]
        self.o = make_linear(load, "o", bias=spec.output_bias)

    def forward(self, x: Tensor, turn: Turn | None, pool: Tensor, step: AnyStep) -> Tensor:
        """[T, H] to [T, H]; each token's vector, and its key's turned part, go into `pool`."""
        latent = self.latent
        q = self.q(x if latent.q_rank is None else self.q_a_norm(self.q_a(x)))
        q = q.view(x.shape[0], self.spec.heads, latent.nope_dim + latent.rope_dim)
        vector, key = self.kv_a(x).split([latent.rank, latent.rope_dim], -1)
        key = rotate(key[:, None], turn)
        entry = torch.cat([self.kv_a_norm(vector), key[:, 0]], 1)
        store(entry, step.slots, pool, self.spec)
        nope, rope = q.split([latent.nope_dim, latent.rope_dim], -1)
        queries = grow(torch.cat([self.k_b(nope), rotate(rope, turn)], -1), turn)
        found = step.attend(queries, entry, pool, self.spec).view(x.shape[0], self.spec.heads, latent.rank)
        out: Tensor = self.o(self.v_b(found).flatten(1))
        return out

    def parts(self, hidden: int) -> Iterator[Part]:
        """Yield what computes rows by themselves."""
        latent, heads = self.latent, self.spec.heads
        if latent.q_rank is not None:
            yield Part("query vector", hidden, self.q_a)
        yield Part("queries", hidden if latent.q_rank is None else latent.q_rank, self.q)
        yield Part("key-value vector", hidden, self.kv_a)
        for name, each, width in (("keys", self.k_b, latent.nope_dim), ("values", self.v_b, latent.rank)):
            yield Part(name, heads * width, lambda x, each=each: each(x.view(x.shape[0], heads, -1)).flatten(1))  # type: ignore[misc]
        yield Part("output", self.spec.output_dim, self.o)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or both at once; see `LayerSpec`."""

    def __init__(self, spec: LayerSpec, hidden: int, elementwise: Elementwise, load: Load) -> None:
        super().__init__()
        self.spec = spec
        self.attn_norm = make_norm(spec.attn_norm, load, "attn_norm", hidden)
        self.attn_post_norm = make_norm(spec.attn_post_norm, load, "attn_post_norm", hidden)
        self.mlp_norm = make_norm(spec.mlp_norm, load, "mlp_norm", hidden)
        self.mlp_post_norm = make_norm(spec.mlp_post_norm, load, "mlp_post_norm", hidden)
        latent, experts = spec.attention.latent, spec.mlp.experts
        own, other = load.within("attn."), load.within("mlp.")
        self.attn: Any = (
            Attention(spec.attention, own) if latent is None else LatentAttention(spec.attention, latent, own)
        )
        self.mlp: Any = (
            make_mlp(spec.mlp, elementwise, other)
            if experts is None
            else Experts(spec.mlp, experts, elementwise, other)
        )

    def forward(self, x: Tensor, turn: Turn | None, pool: Tensor, step: AnyStep) -> Tensor:
        """[T, H] to [T, H]."""
        normed = self.attn_norm(x)
        attended = self.attn_post_norm(self.attn(normed, turn, pool, step))
        if self.spec.parallel:
            normed = normed if self.spec.mlp_norm is None else self.mlp_norm(x)
            return x + self._scaled(attended + self.mlp_post_norm(self.mlp(normed)))
        x = x + self._scaled(attended)
        return x + self._scaled(self.mlp_post_norm(self.mlp(self.mlp_norm(x))))

    def _scaled(self, x: Tensor) -> Tensor:
        scale = self.spec.residual_scale
        return x if scale == 1 else x * scale

    def parts(self, hidden: int) -> Iterator[Part]:
        """Yield what computes rows by themselves."""
        for norm in (self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm):
            if isinstance(norm, Norm):
                yield Part("norm", hidden, norm)
        yield from self.attn.parts(hidden)
        yield from self.mlp.parts(hidden)


class Decoder(nn.Module):
    """Token ids to logits.

    Args:
        spec: what to build.
        load: returns a weight by canonical name, on the device and in the precision to compute in, or codes.
        max_len: most tokens that a sequence will have.
        dtype, device: what is computed in, and on.
        invariant: compute each row in a way that does not depend on how many there are.
        slots: how many layers are there at once; None for all.

    Attributes:
        stream: what brings in layers, if they are not all there.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        load: Load,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool = False,
        slots: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.elementwise: Elementwise = by_rows if invariant else lambda function, x: function(x)
        make, count = partial(make_layer, spec, self.elementwise, invariant), len(spec.layers)
        lane = Lane(device) if device.type == "cuda" and slots is not None else None
        self.stream = None if slots is None else LayerStream(make, load, count, slots, device, lane)
        layers = (make(load, index) for index in range(count)) if self.stream is None else self.stream.modules()
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(spec.norm, load, "norm", spec.hidden_size)
        embed, bias = load("embed.weight"), load("head.bias") if spec.head_bias else None
        self.embed: Any = CodesEmbedding(embed, dtype) if isinstance(embed, Codes) else Embedding(embed)
        self.positions = nn.Parameter(load("positions.weight"), False) if spec.learned_positions else None
        self.head: Any = self.embed.head(bias) if spec.tied else linear_of(load("head.weight"), bias)
        self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=dtype))
        if invariant:
            _pack(self.head)
        ropes = dict.fromkeys(layer.attention.rope for layer in spec.layers)
        self._rotary = {rope: Rotary(rope, max_len, dtype, device) for rope in ropes if rope is not None}

    def forward(self, token_ids: Tensor, positions: Tensor, pools: list[Tensor], step: AnyStep) -> Tensor:
        """Return float32 logits [K, vocabulary] of the tokens `step.sample_at`; ids and positions are [T]."""
        return self.compute(token_ids, positions, self.turns(positions, step.longest), pools, step)

    def turns(self, positions: Tensor, longest: int) -> Turns:
        """Return how positions [T] below `longest` are turned, for each kind of rotary positions that there is."""
        return {rope: rotary.at(positions, longest) for rope, rotary in self._rotary.items()}

    def compute(self, token_ids: Tensor, positions: Tensor, turns: Turns, pools: list[Tensor], step: AnyStep) -> Tensor:
        """See `forward`, of which this is all that can be traced."""
        x = self.embedded(token_ids, positions)
        for layer, spec, pool in zip(self.layers, self.spec.layers, pools, strict=True):
            rope = spec.attention.rope
            x = layer(x, None if rope is None else turns[rope], pool, step)
        if step.sample_at is not None:
            x = x.index_select(0, step.sample_at)
        return self._scaled(self.head(self.norm(x)).float())

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return what the first layer gets, [T, H]."""
        x: Tensor = self.embed(token_ids)
        if self.spec.embed_scale != 1:
            x = x * self._embed_scale  # rounded as the reference does it
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        return x

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits = self.elementwise(torch.tanh, logits / cap) * cap
        return logits

    def parts(self) -> Iterator[Part]:
        """Yield what computes rows by themselves, each kind of layer once."""
        layers: dict[LayerSpec, Any] = dict(zip(self.spec.layers, self.layers, strict=True))
        for layer in layers.values():
            yield from layer.parts(self.spec.hidden_size)

    def pad(self, padding: Padding) -> None:
        """Have experts compute with so many rows, as all else does."""
        self.change(partial(_pad, padding=padding))

    def change(self, change: Callable[[Any], object]) -> None:
        """Do something to every layer."""
        for layer in self.layers:
            if isinstance(layer, Layer):
                change(layer)
        if self.stream is not None:
            self.stream.change(change)


def make_layer(spec: DecoderSpec, elementwise: Elementwise, invariant: bool, load: Load, index: int) -> Layer:
    """Return a layer of a decoder by its number; see `Decoder` for the rest."""
    layer = Layer(spec.layers[index], spec.hidden_size, elementwise, load.within(f"layers.{index}."))
    if invariant:
        _pack(layer)
    return layer


def _pack(part: nn.Module) -> None:
    for module in part.modules():
        if isinstance(module, Linear | ExpertLinear | CodesLinear | ExpertCodes):
            module.pack()


def _pad(part: nn.Module, padding: Padding) -> None:
    for module in part.modules():
        if isinstance(module, Experts):
            module.padding = padding
