"""Attention to a cache in blocks, as one node: `com.microsoft.PagedAttention`, which ONNX Runtime has for CUDA.

Inputs of a call with S sequences of T new tokens in all, laid end to end:

- `cumulative_sequence_length` [S + 1] int32, where each sequence's tokens begin, and T,
- `past_seqlens` [S] int32, tokens of each that are in the cache already,
- `block_table` [S, M] int32, blocks of each in order; places beyond its end may hold anything,
- `slot_mapping` [T] int32, where each token's key and value go: block * block size + offset, or -1 for nowhere,
- `attention_metadata` [3] int32, in the host's memory: the most new tokens that a sequence has, the most that any has
  in all, and what the longest has at least; bounds, by which kernels are chosen and which must hold for every replay
  of a captured graph,
- `past_key_values.N.key`, `.value` [blocks, block size, G, D], the cache, which is written in place. Latent attention
  has no `.value`: values are the first dimensions of keys.

The operator takes float16 and bfloat16, and heads whose width is a multiple of eight. Its fast kernel reads blocks of
256 tokens of any width, and wants heads of at most 256; others are gathered first. Source: paged_attention.cc and
paged_attention_helper.h of onnxruntime's contrib_ops, and the operator's schema.
"""

__all__ = ["BLOCK", "Pages", "attend_to_pages", "pages", "refusal"]

from dataclasses import dataclass

import onnx_ir as ir

from xinfer.backends.onnx.graph import Graph
from xinfer.models.spec import AttentionSpec, DecoderSpec

BLOCK = 256  # tokens; the fast kernel wants multiples of 256, 128 or 64, by the width of heads
_WIDEST = 256  # heads that the fast kernel takes


@dataclass(frozen=True, slots=True)
class Pages:
    """What attention is told of the sequences, the same in all layers; see the module.

    Attributes:
        positions: [1, T] int64, where something else than the operator needs them.
    """

    positions: ir.Value | None
    starts: ir.Value
    past: ir.Value
    blocks: ir.Value
    slots: ir.Value
    bounds: ir.Value


def pages(graph: Graph, positions: ir.Value | None) -> Pages:
    """Add the inputs that tell of the sequences."""
    whole = ir.DataType.INT32
    return Pages(
        positions,
        starts=graph.input("cumulative_sequence_length", ["starts"], whole),
        past=graph.input("past_seqlens", ["sequences"], whole),
        blocks=graph.input("block_table", ["sequences", "width"], whole),
        slots=graph.input("slot_mapping", ["tokens"], whole),
        bounds=graph.input("attention_metadata", [3], whole),
    )


def attend_to_pages(
    graph: Graph,
    spec: AttentionSpec,
    index: int,
    pages: Pages,
    qkv: tuple[ir.Value, ir.Value | None, ir.Value | None],
    width: int,
    tables: tuple[ir.Value | None, ir.Value | None],
    sinks: ir.Value | None,
) -> ir.Value:
    """Append to the cache and attend to it: [1, T, Q * width], or [1, T, Q * rank] of latent attention.

    Args:
        graph: where the node goes.
        spec: what is computed.
        index: of which layer it is.
        pages: the sequences.
        qkv: [1, T, heads * width] each; queries alone hold all three, and latent attention has no values.
        width: of a head.
        tables: cosine and sine, where the operator turns queries and keys.
        sinks: [Q] scores besides.
    """
    latent = spec.latent
    parts = ("key",) if latent is not None else ("key", "value")
    shape: list[int | str] = ["blocks", "block", spec.kv_heads, width]
    cache = [graph.input(f"past_key_values.{index}.{part}", shape) for part in parts]
    q, k, v = qkv
    packed = spec.heads + 2 * spec.kv_heads if k is None else spec.heads
    flat = [
        None if x is None else graph.op("Reshape", x, graph.constant([-1, heads * width]))
        for x, heads in ((q, packed), (k, spec.kv_heads), (v, spec.kv_heads))
    ]
    more: dict[str, int | float | str] = {}
    if latent is not None:
        more = {"kv_cache_layout": "LATENT", "v_head_size": latent.rank}
    if tables[0] is not None:
        assert spec.rope is not None
        more |= {"do_rotary": 1, "rotary_interleaved": int(spec.rope.interleaved)}
    found = graph.op(
        "PagedAttention",
        *flat,
        *cache,
        *([None] if latent is not None else []),
        pages.starts,
        pages.past,
        pages.blocks,
        *tables,
        pages.slots,
        sinks,
        *([None] * 4),  # norms of queries and keys, scales of a quantized cache
        pages.bounds,
        num_heads=spec.heads,
        kv_num_heads=spec.kv_heads,
        scale=spec.scale,
        local_window_size=-1 if spec.window is None else spec.window,
        softcap=spec.softcap or 0.0,
        **more,
    )
    return graph.op("Reshape", found, graph.constant([1, -1, spec.heads * (latent.rank if latent else width)]))


def refusal(spec: DecoderSpec) -> str | None:
    """Return which field of a spec the operator can't do."""
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        if attention.sinks and attention.latent is not None:
            return f"layers[{index}].attention.sinks is set, of latent attention, on CUDA"
        if attention.sinks and attention.head_dim > _WIDEST:
            return f"layers[{index}].attention.sinks is set, with heads wider than {_WIDEST}, on CUDA"
    return None
