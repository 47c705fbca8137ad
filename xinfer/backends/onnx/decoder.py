"""The graph of a decoder, written from its `DecoderSpec`.

Inputs of a call with B sequences of S new tokens each:

- `input_ids` [B, S] int32,
- `last` [B] int32, the place of each sequence's last token in its row of the cache,
- `longest` [1] int32, tokens of the longest sequence, the new ones counted,
- `sample_at` [K] int32, the tokens, as indices into B * S, whose logits are wanted,
- `position_ids` [B, S] int64, of models that need them (learned positions, some turns),
- `past_key_values.N.key`, `.value`, [rows, G, slots, D], the cache, of which `present.N...` is the same memory.

The output is `logits` [K, vocabulary] float32.

With `Form.paged` there is one row of all sequences' tokens, end to end, instead of `last` and `longest` there are the
inputs that `paged.py` tells, and weights are inputs too.
"""

__all__ = ["write"]

import numpy as np
import onnx_ir as ir

from xinfer.backends.onnx.attention import Cache, attend, needs_positions
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.graph import Graph
from xinfer.backends.onnx.linear import Writer
from xinfer.backends.onnx.mlp import feed_forward
from xinfer.backends.onnx.paged import Pages, pages
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.spec import DecoderSpec

_DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def write(spec: DecoderSpec, form: Form) -> tuple[ir.Model, dict[str, Recipe]]:
    """Return the graph, and of each of its weights how it is made."""
    graph = Graph(_DTYPES[form.dtype], bound=form.paged)
    writer = Writer(graph, spec, form)
    rows: int | str = 1 if form.paged else "rows"
    token_ids = graph.input("input_ids", [rows, "tokens"], ir.DataType.INT32)
    sample_at = graph.input("sample_at", ["sampled"], ir.DataType.INT32)
    positions = None
    if spec.learned_positions or any(needs_positions(layer.attention, form.paged) for layer in spec.layers):
        positions = graph.input("position_ids", [rows, "tokens"], ir.DataType.INT64)
    cache = pages(graph, positions) if form.paged else _rows(graph, positions, form.ragged)
    x = _embedded(writer, token_ids, positions)
    more: ir.Value | None = None  # what is still to be added to x
    for index in range(len(spec.layers)):
        x, more = _layer(writer, x, more, index, cache)
    x = x if more is None else graph.op("Add", x, more)
    wanted = graph.op("Gather", graph.op("Reshape", x, graph.constant([-1, spec.hidden_size])), sample_at, axis=0)
    logits = _head(writer, writer.norm(wanted, spec.norm, "norm", spec.hidden_size))
    graph.output(logits, "logits", ["sampled", spec.vocab_size], ir.DataType.FLOAT)
    graph.outputs.insert(0, graph.outputs.pop())
    return graph.model({}), graph.recipes


def _rows(graph: Graph, positions: ir.Value | None, ragged: bool) -> Cache:
    last = graph.input("last", ["rows"], ir.DataType.INT32)
    longest = graph.input("longest", [1], ir.DataType.INT32)
    lengths = graph.input("lengths", ["rows"], ir.DataType.INT32) if ragged else None
    return Cache(last, longest, positions, lengths)


def _layer(
    writer: Writer, x: ir.Value, more: ir.Value | None, index: int, cache: Cache | Pages
) -> tuple[ir.Value, ir.Value]:
    """Write a layer for x + more; return the same of its output, to be added where the next norm is written."""
    spec, prefix = writer.spec.layers[index], f"layers.{index}."
    hidden = writer.spec.hidden_size
    if more is None:
        normed = writer.norm(x, spec.attn_norm, f"{prefix}attn_norm", hidden)
    else:
        x, normed = writer.add_and_norm(x, more, spec.attn_norm, f"{prefix}attn_norm")
    attended = writer.norm(attend(writer, normed, index, cache), spec.attn_post_norm, f"{prefix}attn_post_norm", hidden)
    if spec.parallel:
        if spec.mlp_norm is not None:
            normed = writer.norm(x, spec.mlp_norm, f"{prefix}mlp_norm", hidden)
        return x, _scaled(writer, writer.graph.op("Add", attended, _mlp(writer, normed, index)), spec.residual_scale)
    x, normed = writer.add_and_norm(
        x, _scaled(writer, attended, spec.residual_scale), spec.mlp_norm, f"{prefix}mlp_norm"
    )
    return x, _scaled(writer, _mlp(writer, normed, index), spec.residual_scale)


def _mlp(writer: Writer, x: ir.Value, index: int) -> ir.Value:
    spec = writer.spec
    norm = spec.layers[index].mlp_post_norm
    return writer.norm(feed_forward(writer, x, index), norm, f"layers.{index}.mlp_post_norm", spec.hidden_size)


def _scaled(writer: Writer, x: ir.Value, factor: float) -> ir.Value:
    return x if factor == 1 else writer.graph.op("Mul", x, writer.graph.number(factor))


def _embedded(writer: Writer, token_ids: ir.Value, positions: ir.Value | None) -> ir.Value:
    """[B, S] to [B, S, H]."""
    graph, spec = writer.graph, writer.spec
    x = writer.rows_of("embed", token_ids)
    if spec.embed_scale != 1:
        x = graph.op("Mul", x, graph.number(spec.embed_scale))
    if spec.learned_positions:
        shape = spec.tensors["positions.weight"]
        table = graph.weight("positions.weight", shape, Recipe("rows", ("positions.weight",)))
        x = graph.op("Add", x, graph.op("Gather", table, positions, axis=0))
    return x


def _head(writer: Writer, x: ir.Value) -> ir.Value:
    """[K, H] to logits [K, vocabulary] float32."""
    graph, spec = writer.graph, writer.spec
    logits = writer.head(x)
    if graph.dtype != ir.DataType.FLOAT:
        logits = graph.cast(logits, ir.DataType.FLOAT)
    if spec.logit_scale != 1:
        logits = graph.op("Mul", logits, graph.constant(spec.logit_scale, np.float32))
    if (cap := spec.logit_softcap) is not None:
        inner = graph.op("Tanh", graph.op("Mul", logits, graph.constant(1 / cap, np.float32)))
        logits = graph.op("Mul", inner, graph.constant(cap, np.float32))
    return logits
