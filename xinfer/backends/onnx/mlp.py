"""Feed-forward parts as nodes."""

__all__ = ["feed_forward"]

import onnx_ir as ir

from xinfer.backends.onnx.linear import Writer
from xinfer.models.spec import MlpSpec


def feed_forward(writer: Writer, x: ir.Value, index: int) -> ir.Value:
    """Write a layer's feed-forward part, [B, S, H] to [B, S, H]."""
    spec = writer.spec.layers[index].mlp
    prefix = f"layers.{index}.mlp."
    assert spec.experts is None
    return _dense(writer, x, spec, prefix)


def _dense(writer: Writer, x: ir.Value, spec: MlpSpec, prefix: str) -> ir.Value:
    graph = writer.graph
    if not spec.gated:
        between = activation(writer, spec.activation, writer.linear(x, prefix, "up", bias=spec.bias))
    else:
        gate, up = graph.ops("Split", 2, writer.linear(x, prefix, "gate", "up", bias=spec.bias), axis=-1, num_outputs=2)
        between = _gated(writer, spec, gate, up)
    return writer.linear(between, prefix, "down", bias=spec.bias)


def _gated(writer: Writer, spec: MlpSpec, gate: ir.Value, up: ir.Value) -> ir.Value:
    graph = writer.graph
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
