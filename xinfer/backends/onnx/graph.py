"""A graph being written: nodes, and weights that are named and described, not held."""

__all__ = ["Graph"]

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from xinfer.backends.onnx.recipe import Recipe

_OPSET = 21
_WIDE = ("Clip", "Pad")  # which CUDA has in float32, but not in every half precision
_CONTRIB = "com.microsoft"
# Operators that ONNX Runtime adds to the standard; it registers the first in the standard's own domain.
_OF_RUNTIME = {
    "SimplifiedLayerNormalization": "",
    "SkipSimplifiedLayerNormalization": _CONTRIB,
    "GroupQueryAttention": _CONTRIB,
    "PagedAttention": _CONTRIB,
    "FusedMatMul": _CONTRIB,
    "RotaryEmbedding": _CONTRIB,
    "MatMulNBits": _CONTRIB,
    "GatherBlockQuantized": _CONTRIB,
    "QuickGelu": _CONTRIB,
    "MoE": _CONTRIB,
    "QMoE": _CONTRIB,
}


class Graph:
    """Collects nodes in order; a value is what an operator returns.

    Args:
        dtype: precision of activations.
        bound: whether weights are inputs, bound where they lie already; else initializers, given when it is loaded.

    Attributes:
        recipes: of each weight by its name in the graph.
    """

    def __init__(self, dtype: ir.DataType, bound: bool = False) -> None:
        self.dtype, self._bound = dtype, bound
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.recipes: dict[str, Recipe] = {}
        self._tape = Tape()
        self._weights: dict[str, ir.Value] = {}
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def input(self, name: str, shape: Sequence[int | str], dtype: ir.DataType | None = None) -> ir.Value:
        """Add an input of the model."""
        value = ir.val(name, dtype=dtype or self.dtype, shape=tuple(shape))
        self.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, shape: Sequence[int | str], dtype: ir.DataType | None = None) -> None:
        """Make a value an output of the model."""
        value.name, value.dtype, value.shape = name, dtype or self.dtype, ir.Shape(tuple(shape))
        self.outputs.append(value)

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: int | float | str | Sequence[int]) -> ir.Value:
        """Add a node and return its first output."""
        if kind in _WIDE and self.dtype != ir.DataType.FLOAT:
            wide = self._tape.op(kind, [self._widened(value) for value in _trimmed(inputs)], attributes)
            return self.cast(wide, self.dtype)
        return self._tape.op(kind, _trimmed(inputs), attributes, domain=_OF_RUNTIME.get(kind, ""))

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return values in another precision."""
        return self._tape.op("Cast", [value], {"to": int(dtype)})

    def _widened(self, value: ir.Value | None) -> ir.Value | None:
        """Return values of activations' precision in float32, others as they are."""
        constant = None if value is None else value.const_value
        if value is None or (constant is not None and constant.dtype != self.dtype):
            return value
        return self.cast(value, ir.DataType.FLOAT) if constant is None else self.constant(constant.numpy(), np.float32)

    def ops(
        self, kind: str, outputs: int, *inputs: ir.Value | None, **attributes: int | float | str | Sequence[int]
    ) -> Sequence[ir.Value]:
        """Add a node and return so many outputs."""
        return self._tape.op_multi_out(
            kind, _trimmed(inputs), attributes, num_outputs=outputs, domain=_OF_RUNTIME.get(kind, "")
        )

    def weight(self, name: str, shape: Sequence[int], recipe: Recipe, dtype: ir.DataType | None = None) -> ir.Value:
        """Return a weight of this name, whose values are given when the model is loaded."""
        if name not in self._weights:
            kind = dtype or self.dtype
            if self._bound:
                self._weights[name] = self.input(name, shape, kind)
            else:
                tensor = ir.ExternalTensor("weights", 0, _bytes(shape, kind), kind, shape=ir.Shape(shape), name=name)
                self._weights[name] = self._tape.initializer(tensor)
            self.recipes[name] = recipe
        assert self.recipes[name] == recipe, f"two weights are named {name}"
        return self._weights[name]

    def constant(self, values: object, dtype: np.dtype | type = np.int64) -> ir.Value:
        """Return a small constant that lies in the graph itself."""
        array = np.asarray(values, dtype)
        key = (f"{array.dtype}{array.shape}", array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array, name=f"constant_{len(self._constants)}")
            self._constants[key] = self._tape.initializer(tensor)
        return self._constants[key]

    def number(self, value: float) -> ir.Value:
        """Return a constant in the precision of activations."""
        return self.constant(value, self.dtype.numpy())

    def model(self, properties: Mapping[str, str]) -> ir.Model:
        """Return what was written."""
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": _OPSET, _CONTRIB: 1},
            name="decoder",
        )
        return ir.Model(graph, ir_version=10, producer_name="xinfer", metadata_props=dict(properties))


def _trimmed(inputs: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Leave out absent inputs at the end."""
    values = list(inputs)
    while values and values[-1] is None:
        values.pop()
    return values


def _bytes(shape: Sequence[int], dtype: ir.DataType) -> int:
    return int(np.prod(shape, dtype=np.int64) * dtype.bitwidth // 8)
