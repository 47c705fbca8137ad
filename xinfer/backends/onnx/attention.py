"""Attention as nodes: projections, normalizations and turning around one operator that keeps the cache.

All kinds are brought to `com.microsoft.GroupQueryAttention`, which appends keys and values to the cache in place, or
to `com.microsoft.PagedAttention` (`paged.py`), of whose tokens, end to end, B is 1 here and S their number. Of latent
attention its vector is the only key head, and the same vector the value. What the operator can't do itself is written
before it: normalized or clipped queries and keys, turns of widths that it refuses, heads of odd widths.
Shapes: B sequences, S new tokens of each, H hidden, Q query heads, G key/value heads, D width of a head.
"""

__all__ = ["Cache", "attend", "head_width", "needs_positions", "turns_inside"]

from dataclasses import dataclass

import onnx_ir as ir

from xinfer.backends.onnx.linear import Writer
from xinfer.backends.onnx.paged import Pages, attend_to_pages
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.spec import AttentionSpec, LatentSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Cache:
    """What attention is told of the sequences, the same in all layers.

    Attributes:
        last: [B] int32, the place of each sequence's last token in its row.
        longest: [1] int32, tokens of the longest sequence, the new ones counted.
        positions: [B, S] int64, where something else than the operator needs them.
        lengths: [B] int32, each sequence's new tokens, where they may differ (`Form.ragged`).
    """

    last: ir.Value
    longest: ir.Value
    positions: ir.Value | None
    lengths: ir.Value | None = None


def head_width(spec: AttentionSpec) -> int:
    """Return how wide heads are for the operator, which takes multiples of eight."""
    return -(-spec.head_dim // 8) * 8


def turns_inside(spec: AttentionSpec, paged: bool = False) -> bool:
    """Whether the operator can turn queries and keys by itself."""
    rope = spec.rope
    if paged and spec.latent is not None:
        return False  # what is turned comes last there
    return rope is not None and not spec.qk_norm_turned and rope.dim % 16 == 0 and head_width(spec) % 16 == 0


def needs_positions(spec: AttentionSpec, paged: bool = False) -> bool:
    """Whether nodes other than the operator need to know tokens' positions."""
    return spec.rope is not None and (not turns_inside(spec, paged) or spec.rope.query_growth != 0)


def attend(writer: Writer, x: ir.Value, index: int, cache: Cache | Pages) -> ir.Value:
    """Write a layer's attention, [B, S, H] to [B, S, H]."""
    spec = writer.spec.layers[index].attention
    if spec.latent is not None:
        return _Latent(writer, spec, spec.latent, index, cache).write(x)
    return _Grouped(writer, spec, index, cache).write(x)


class _Attention:
    """What both kinds have in common."""

    def __init__(self, writer: Writer, spec: AttentionSpec, index: int, cache: Cache | Pages) -> None:
        self.writer, self.graph, self.spec, self.index, self.cache = writer, writer.graph, spec, index, cache
        self.prefix = f"layers.{index}.attn."
        self.inside = turns_inside(spec, isinstance(cache, Pages))

    def heads(self, x: ir.Value, heads: int) -> ir.Value:
        """[B, S, heads * D] to [B, S, heads, D]."""
        return self.graph.op("Reshape", x, self.graph.constant([0, 0, heads, -1]))

    def flat(self, x: ir.Value) -> ir.Value:
        """[B, S, heads, D] to [B, S, heads * D]."""
        return self.graph.op("Reshape", x, self.graph.constant([0, 0, -1]))

    def turned(self, x: ir.Value, heads: int) -> ir.Value:
        """Turn [B, S, heads * D] by tokens' positions, where the operator does not."""
        rope = self.spec.rope
        if rope is None or self.inside:
            return x
        cos, sin = self.tables(rope)
        return self.graph.op(
            "RotaryEmbedding",
            x,
            self.cache.positions,
            cos,
            sin,
            interleaved=int(rope.interleaved),
            num_heads=heads,
            rotary_embedding_dim=rope.dim,
        )

    def tables(self, rope: RopeSpec) -> tuple[ir.Value, ir.Value]:
        """Return cosine and sine of every position, [max_len, dim / 2]."""
        ropes = [layer.attention.rope for layer in self.writer.spec.layers]
        first = ropes.index(rope)
        shape = [self.writer.form.max_len, rope.dim // 2]
        cos, sin = (
            self.graph.weight(f"rope.{first}.{kind}", shape, Recipe(kind, layer=first)) for kind in ("cos", "sin")
        )
        return cos, sin

    def grown(self, q: ir.Value) -> ir.Value:
        """Multiply queries [B, S, Q * D] by what their positions ask for."""
        rope = self.spec.rope
        if rope is None or not rope.query_growth:
            return q
        first = [layer.attention.rope for layer in self.writer.spec.layers].index(rope)
        shape = [self.writer.form.max_len, 1]
        table = self.graph.weight(f"rope.{first}.growth", shape, Recipe("growth", layer=first))
        return self.graph.op("Mul", q, self.graph.op("Gather", table, self.cache.positions, axis=0))

    def widened(self, x: ir.Value, heads: int) -> ir.Value:
        """Pad each head of [B, S, heads * D] with zeros to the width that the operator takes."""
        missing = head_width(self.spec) - self.spec.head_dim
        if not missing:
            return x
        pads = self.graph.constant([0] * 7 + [missing])
        return self.flat(self.graph.op("Pad", self.heads(x, heads), pads))

    def narrowed(self, x: ir.Value, start: int, end: int) -> ir.Value:
        """Keep dimensions `start` up to `end` of each head of [B, S, Q * width], if these are not all."""
        if start == 0 and end == head_width(self.spec):
            return x
        each = self.heads(x, self.spec.heads)
        kept = self.graph.op(
            "Slice", each, *(self.graph.constant([number]) for number in (start, end, -1)), self.graph.constant([1])
        )
        return self.flat(kept)

    def operator(self, q: ir.Value, k: ir.Value | None, v: ir.Value | None) -> ir.Value:
        """Append to the cache and attend to it: [B, S, Q * width]; q alone holds all three."""
        graph, spec, form = self.graph, self.spec, self.writer.form
        width = head_width(spec)
        inside = self.inside
        assert spec.rope is not None or not inside
        tables = self.tables(spec.rope) if inside and spec.rope is not None else (None, None)
        sinks = None
        if spec.sinks:
            sinks = graph.weight(f"{self.prefix}sinks", [spec.heads], Recipe("rows", (f"{self.prefix}sinks",)))
        if isinstance(self.cache, Pages):
            return attend_to_pages(graph, spec, self.index, self.cache, (q, k, v), width, tables, sinks)
        shape: list[int | str] = ["rows", spec.kv_heads, "slots", width]
        kind = ir.DataType.INT8 if form.kv_dtype == "int8" else graph.dtype
        past = [graph.input(f"past_key_values.{self.index}.{part}", shape, kind) for part in ("key", "value")]
        scales: list[ir.Value | None] = [None, None]
        more: dict[str, int | float | str] = {}
        if form.kv_dtype == "int8":
            size = [spec.kv_heads * width]
            scales = [
                graph.weight(
                    f"{self.prefix}{name}_scale", size, Recipe(f"kv_scale {name}", layer=self.index), ir.DataType.FLOAT
                )
                for name in ("key", "value")
            ]
            more = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        inputs = [q, k, v, *past, self.cache.last, self.cache.longest, *tables, None, None, sinks, *scales]
        if self.cache.lengths is not None:
            inputs += [None, None, self.cache.lengths]
        outs = graph.ops(
            "GroupQueryAttention",
            3,
            *inputs,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.scale,
            do_rotary=int(inside),
            rotary_interleaved=int(inside and spec.rope is not None and spec.rope.interleaved),
            local_window_size=-1 if spec.window is None else spec.window,
            softcap=spec.softcap or 0.0,
            **more,
        )
        for value, part in zip(outs[1:], ("key", "value"), strict=True):
            graph.output(value, f"present.{self.index}.{part}", shape, kind)
        return outs[0]


class _Grouped(_Attention):
    """Grouped-query attention, queries, keys and values from one matrix."""

    def write(self, x: ir.Value) -> ir.Value:
        """[B, S, H] to [B, S, H]."""
        spec, graph = self.spec, self.graph
        qkv = self.writer.linear(x, self.prefix, "q", "k", "v", bias=spec.qkv_bias)
        if self._is_plain():
            out = self.operator(qkv, None, None)
        else:
            sizes = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
            q, k, v = graph.ops("Split", 3, qkv, graph.constant(sizes), axis=-1)
            q, k, v = self._prepared(q, "q_norm", spec.heads), self._prepared(k, "k_norm", spec.kv_heads), self._cut(v)
            out = self.operator(
                self.widened(self.grown(q), spec.heads), self.widened(k, spec.kv_heads), self.widened(v, spec.kv_heads)
            )
        return self.writer.linear(self.narrowed(out, 0, spec.head_dim), self.prefix, "o", bias=spec.output_bias)

    def _is_plain(self) -> bool:
        spec = self.spec
        turned = spec.rope is None or self.inside
        grown = spec.rope is not None and spec.rope.query_growth != 0
        return turned and not grown and spec.qk_norm is None and spec.clip is None and head_width(spec) == spec.head_dim

    def _prepared(self, x: ir.Value, name: str, heads: int) -> ir.Value:
        """Normalize, clip and turn queries or keys [B, S, heads * D]."""
        if self.spec.qk_norm_turned:
            return self._cut(self._normed(self.turned(x, heads), name, heads))
        return self.turned(self._cut(self._normed(x, name, heads)), heads)

    def _normed(self, x: ir.Value, name: str, heads: int) -> ir.Value:
        norm, width, writer = self.spec.qk_norm, self.spec.head_dim, self.writer
        if norm is None:
            return x
        if self.spec.qk_norm_over == "all":
            return writer.norm(x, norm, self.prefix + name, heads * width)
        each = self.heads(x, heads)
        if self.spec.qk_norm_over == "heads":
            return self.flat(writer.norm_per_head(each, norm, self.prefix + name, heads, width))
        return self.flat(writer.norm(each, norm, self.prefix + name, width))

    def _cut(self, x: ir.Value) -> ir.Value:
        most = self.spec.clip
        return x if most is None else self.graph.op("Clip", x, self.graph.number(-most), self.graph.number(most))


class _Latent(_Attention):
    """Attention to one vector a token.

    Its turned part comes first, as the operator turns first dimensions; in pages last, where a cache without values
    takes first dimensions for them.
    """

    def __init__(
        self, writer: Writer, spec: AttentionSpec, latent: LatentSpec, index: int, cache: Cache | Pages
    ) -> None:
        super().__init__(writer, spec, index, cache)
        self.latent = latent

    def write(self, x: ir.Value) -> ir.Value:
        """[B, S, H] to [B, S, H]."""
        spec, latent, graph, writer = self.spec, self.latent, self.graph, self.writer
        if latent.q_rank is None:
            q = writer.linear(x, self.prefix, "q")
        else:
            low = writer.linear(x, self.prefix, "q_a", bias=spec.qkv_bias)
            low = writer.norm(low, latent.norm, f"{self.prefix}q_a_norm", latent.q_rank)
            q = writer.linear(low, self.prefix, "q_b")
        nope, rope = graph.ops(
            "Split", 2, self.heads(q, spec.heads), graph.constant([latent.nope_dim, latent.rope_dim]), axis=-1
        )
        nope = self._per_head(nope, "k_b", latent.nope_dim, latent.rank)
        vector, key = graph.ops(
            "Split",
            2,
            writer.linear(x, self.prefix, "kv_a", bias=spec.qkv_bias),
            graph.constant([latent.rank, latent.rope_dim]),
            axis=-1,
        )
        vector = writer.norm(vector, latent.norm, f"{self.prefix}kv_a_norm", latent.rank)
        if isinstance(self.cache, Pages):
            rope = self.heads(self.turned(self.flat(rope), spec.heads), spec.heads)
            q = self.grown(self.flat(graph.op("Concat", nope, rope, axis=-1)))
            entry = graph.op("Concat", vector, self.turned(key, 1), axis=-1)
            found = self.operator(self.widened(q, spec.heads), self.widened(entry, 1), None)
        else:
            q = self.flat(graph.op("Concat", rope, nope, axis=-1))
            entry = graph.op("Concat", key, vector, axis=-1)
            q = self.widened(self.grown(self.turned(q, spec.heads)), spec.heads)
            found = self.operator(q, self.widened(self.turned(entry, 1), 1), self.widened(entry, 1))
            found = self.narrowed(found, latent.rope_dim, latent.rope_dim + latent.rank)
        out = self._per_head(self.heads(found, spec.heads), "v_b", latent.rank, latent.value_dim)
        return writer.linear(self.flat(out), self.prefix, "o", bias=spec.output_bias)

    def _per_head(self, x: ir.Value, name: str, width: int, out: int) -> ir.Value:
        """[B, S, Q, width] to [B, S, Q, out], each head by a matrix of its own."""
        graph, source = self.graph, f"{self.prefix}{name}.weight"
        shape = [self.spec.heads, width, out]
        weight = graph.weight(
            source, shape, Recipe("per_head" if name == "k_b" else "per_head turned", (source,), self.index)
        )
        first = graph.op("Transpose", x, perm=[0, 2, 1, 3])
        return graph.op("Transpose", graph.op("MatMul", first, weight), perm=[0, 2, 1, 3])
