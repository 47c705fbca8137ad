"""Feed-forward parts as nodes."""

__all__ = ["feed_forward"]

from dataclasses import replace
from functools import partial

import onnx_ir as ir

from xinfer.backends.onnx.experts import float_linear, routed
from xinfer.backends.onnx.linear import Writer
from xinfer.models.spec import MlpSpec


def feed_forward(writer: Writer, x: ir.Value, index: int) -> ir.Value:
    """Write a layer's feed-forward part, [B, S, H] to [B, S, H]."""
    graph, spec = writer.graph, writer.spec.layers[index].mlp
    prefix, experts = f"layers.{index}.mlp.", spec.experts
    if experts is None:
        return _dense(writer, x, spec, prefix)
    out = routed(writer, x, spec, prefix, partial(_between, writer, spec))
    if experts.shared is None:
        return out
    shared = _dense(writer, x, replace(spec, size=experts.shared, experts=None), f"{prefix}shared.")
    if experts.shared_gate:
        gate = graph.op("Sigmoid", float_linear(writer, x, f"{prefix}shared_gate"))
        if graph.dtype != ir.DataType.FLOAT:
            gate = graph.op("Cast", gate, to=int(graph.dtype))
        shared = graph.op("Mul", shared, gate)
    return graph.op("Add", out, shared)


def _dense(writer: Writer, x: ir.Value, spec: MlpSpec, prefix: str) -> ir.Value:
    gate: ir.Value | None = None
    if spec.gated:
        both = writer.linear(x, prefix, "gate", "up", bias=spec.bias)
        gate, up = writer.graph.ops("Split", 2, both, axis=-1, num_outputs=2)
    else:
        up = writer.linear(x, prefix, "up", bias=spec.bias)
    return writer.linear(_between(writer, spec, gate, up), prefix, "down", bias=spec.bias)


def _between(writer: Writer, spec: MlpSpec, gate: ir.Value | None, up: ir.Value) -> ir.Value:
    graph = writer.graph
    if gate is None:
        return activation(writer, spec.activation, up)
    if spec.activation != "swiglu":
        return graph.op("Mul", activation(writer, spec.activation, gate), up)
    most, least = graph.number(spec.limit), graph.number(-spec.limit)
    gate, up = graph.op("Clip", gate, None, most), graph.op("Clip", up, least, most)
    return graph.op("Mul", graph.op("QuickGelu", gate, alpha=spec.alpha), graph.op("Add", up, graph.number(1)))


def activation(writer: Writer, name: str, x: ir.Value) -> ir.Value:
    """Apply the function of this name, of `MlpSpec.activation`."""
    graph = writer.graph
    if name == "silu":
        return graph.op("QuickGelu", x, alpha=1.0)  # x * sigmoid(1 * x), in one node
    if name in ("gelu", "gelu_tanh"):
        return graph.op("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")
    positive = graph.op("Relu", x)
    return positive if name == "relu" else graph.op("Mul", positive, positive)
