"""The graph of a decoder, written from its `DecoderSpec`.

Inputs of a call with B sequences of S new tokens each:

- `input_ids` [B, S] int32,
- `last` [B] int32, the place of each sequence's last token in its row of the cache,
- `longest` [1] int32, tokens of the longest sequence, the new ones counted,
- `sample_at` [K] int32, the tokens, as indices into B * S, whose logits are wanted,
- `position_ids` [B, S] int64, of models that need them (learned positions, some turns),
- `past_key_values.N.key`, `.value`, [rows, G, slots, D], the cache, of which `present.N...` is the same memory.

The output is `logits` [K, vocabulary] float32.

With `Form.genai` it has what onnxruntime-genai feeds, which pads shorter sequences on the right:

- `input_ids` [B, S] int64,
- `attention_mask` [B, T] int64, 1 for every token so far, 0 for what a prompt was padded with,
- `position_ids` [B, S] int64 and `past_key_values.N...` as above; `present.N...` may be that memory, or be longer.

The output is `logits` [B, 1, vocabulary] float32, of each sequence's last new token: by that 1 onnxruntime-genai knows
that it need not look for it. With `Form.all_logits` they are those of all, [B, S, vocabulary].

With `Form.paged` there is one row of all sequences' tokens, end to end, instead of `last` and `longest` there are the
inputs that `paged.py` tells, and weights are inputs too.
"""

__all__ = ["write", "write_part"]

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from xinfer.backends.onnx.attention import Cache, attend, needs_positions
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.graph import Graph
from xinfer.backends.onnx.linear import Writer
from xinfer.backends.onnx.mlp import feed_forward
from xinfer.backends.onnx.paged import Pages, pages
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.quantize.smoothing import LOOKUP
from xinfer.models.spec import DecoderSpec

_DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a call brings.

    Attributes:
        token_ids: [B, S].
        cache: what attention is told.
        wanted: which tokens' logits are wanted, as `_rows` takes it; None for all.
    """

    token_ids: ir.Value
    cache: Cache | Pages
    wanted: ir.Value | None


def write(spec: DecoderSpec, form: Form) -> tuple[ir.Model, dict[str, Recipe]]:
    """Return the graph, and of each of its weights how it is made."""
    graph = Graph(_DTYPES[form.dtype], bound=form.paged)
    writer = Writer(graph, spec, form)
    given = _inputs_of_genai(writer) if form.genai else _inputs(writer)
    x = _embedded(writer, given.token_ids, given.cache.positions)
    more: ir.Value | None = None  # what is still to be added to x
    for index in range(len(spec.layers)):
        _tell(writer, x, more, index)
        x, more = _layer(writer, x, more, index, given.cache)
    _tell(writer, x, more, len(spec.layers))
    x = x if more is None else graph.op("Add", x, more)
    logits = _head(writer, writer.norm(_rows(writer, x, given.wanted), spec.norm, "norm", spec.hidden_size))
    places: list[int | str] = ["sampled"]
    if form.genai:
        places = ["batch", "sequence" if form.all_logits else 1]
        _name_lengths(graph)
    graph.output(logits, "logits", [*places, spec.vocab_size], ir.DataType.FLOAT)
    graph.outputs.insert(0, graph.outputs.pop())
    return graph.model({}), graph.recipes


def write_part(spec: DecoderSpec, form: Form, part: int) -> tuple[ir.Model, dict[str, Recipe], dict[str, str]]:
    """Return a part of the graph that tells of its matrices' inputs, and of each matrix the output that does.

    Args:
        spec: the model.
        form: whose `scheme` is None.
        part: 0 is the embedding, N the layer N - 1, and the one behind the last layer what comes before the head. All
            but the first have the input `hidden` [B, S, H], all but the last the output `next`, which that is.

    Such an output is [B, in, in], the sum of x' x over a sequence's tokens; see `Writer.watched`.
    """
    graph = Graph(_DTYPES[form.dtype])
    writer = Writer(graph, spec, form, watches=True)
    given, hidden = _inputs(writer), spec.hidden_size
    if part == 0:
        x = _embedded(writer, given.token_ids, given.cache.positions)
    else:
        x = graph.input("hidden", ["rows", "tokens", hidden])
    if part > len(spec.layers):
        writer.watch(
            writer.norm(x, spec.norm, "norm", hidden), ["embed.weight" if spec.tied else "head.weight"], hidden
        )
    else:
        if part > 0:
            x = graph.op("Add", *_layer(writer, x, None, part - 1, given.cache))
        graph.output(x, "next", ["rows", "tokens", hidden])
    return graph.model({}), graph.recipes, writer.watched


def _inputs(writer: Writer) -> _Inputs:
    """Declare what our own runners feed."""
    graph, form = writer.graph, writer.form
    rows: int | str = 1 if form.paged else "rows"
    token_ids = graph.input("input_ids", [rows, "tokens"], ir.DataType.INT32)
    sample_at = graph.input("sample_at", ["sampled"], ir.DataType.INT32)
    positions = _positions(writer, [rows, "tokens"])
    if form.paged:
        return _Inputs(token_ids, pages(graph, positions), sample_at)
    last = graph.input("last", ["rows"], ir.DataType.INT32)
    longest = graph.input("longest", [1], ir.DataType.INT32)
    lengths = graph.input("lengths", ["rows"], ir.DataType.INT32) if form.ragged else None
    return _Inputs(token_ids, Cache(last, longest, positions, lengths), sample_at)


def _inputs_of_genai(writer: Writer) -> _Inputs:
    """Declare what onnxruntime-genai feeds, and compute from it what attention is told.

    A sequence's last token is the last of its prompt while that is computed, and then the last of all.
    """
    graph, one, int32 = writer.graph, writer.graph.constant([1]), ir.DataType.INT32.value
    token_ids = graph.input("input_ids", ["batch", "sequence"], ir.DataType.INT64)
    mask = graph.input("attention_mask", ["batch", "total"], ir.DataType.INT64)
    positions = _positions(writer, ["batch", "sequence"])
    last = graph.op("Sub", graph.op("ReduceSum", mask, one, keepdims=0), one)
    longest = graph.op("Shape", mask, start=1, end=2)
    cache = Cache(graph.op("Cast", last, to=int32), graph.op("Cast", longest, to=int32), positions)
    if writer.form.all_logits:
        return _Inputs(token_ids, cache, None)
    newest = graph.op("Sub", graph.op("Shape", token_ids, start=1, end=2), one)
    return _Inputs(token_ids, cache, graph.op("Unsqueeze", graph.op("Min", last, newest), graph.constant([1, 2])))


def _positions(writer: Writer, shape: list[int | str]) -> ir.Value | None:
    """Declare tokens' positions, where the model needs them."""
    spec = writer.spec
    if spec.learned_positions or any(needs_positions(layer.attention, writer.form.paged) for layer in spec.layers):
        return writer.graph.input("position_ids", shape, ir.DataType.INT64)
    return None


def _rows(writer: Writer, x: ir.Value, wanted: ir.Value | None) -> ir.Value:
    """Take from [B, S, H] what logits are wanted of: [K] of B * S, or one [B, 1, 1] of each sequence; None for all."""
    graph = writer.graph
    if wanted is None:
        return x
    if writer.form.genai:
        return graph.op("GatherND", x, wanted, batch_dims=1)
    return graph.op("Gather", graph.op("Reshape", x, graph.constant([-1, writer.spec.hidden_size])), wanted, axis=0)


def _name_lengths(graph: Graph) -> None:
    """Let caches before and after a call be of different lengths, as they are where they don't share their memory."""
    for values, name, length in ((graph.inputs, "past_key_values.", "past"), (graph.outputs, "present.", "present")):
        for value in values:
            if value.name is not None and value.name.startswith(name) and value.shape is not None:
                value.shape = ir.Shape(("batch", value.shape[1], length, value.shape[3]))


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


def _tell(writer: Writer, x: ir.Value, more: ir.Value | None, index: int) -> None:
    """Let the graph tell what goes into a layer, if that is wanted."""
    if writer.form.layers:
        told = writer.graph.op("Add", x, writer.graph.number(0.0) if more is None else more)
        writer.graph.output(told, f"layers.{index}", ["rows", "tokens", writer.spec.hidden_size])


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
    if spec.tied and writer.form.scheme is not None and writer.form.scheme.smooths and spec.norm.weight:
        x = graph.op("Mul", x, graph.weight(LOOKUP, [spec.hidden_size], Recipe("rows", (LOOKUP,))))
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
