"""Matrix products and normalizations as nodes."""

__all__ = ["Writer"]

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import onnx_ir as ir

from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.graph import Graph
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.quantize import Scheme
from xinfer.models.spec import DecoderSpec, NormSpec


class Writer:
    """Writes what all parts of a decoder consist of.

    Args:
        graph: where nodes go.
        spec, form: what is written, and for what.
        watches: whether outputs tell of matrices' inputs.

    Attributes:
        watched: of each matrix whose inputs are told of, by its canonical name the output's.
    """

    def __init__(self, graph: Graph, spec: DecoderSpec, form: Form, watches: bool = False) -> None:
        self.graph, self.spec, self.form, self._watches = graph, spec, form, watches
        self.watched: dict[str, str] = {}

    def watch(self, x: ir.Value, sources: Sequence[str], width: int) -> None:
        """Add an output [B, in, in] for x [B, S, in], the sum of x' x, if outputs are to tell of matrices' inputs."""
        if self._watches:
            name = f"gram {sources[0]}"
            self.graph.output(self.graph.op("FusedMatMul", x, x, transA=1), name, ["rows", width, width])
            self.watched |= dict.fromkeys(sources, name)

    def linear(self, x: ir.Value, prefix: str, *names: str, bias: bool = False) -> ir.Value:
        """Multiply [..., in] by the matrices of these names, one below the other, to [..., out]."""
        alike = [tuple(group) for _, group in groupby(names, lambda name: self._scheme(f"{prefix}{name}.weight"))]
        if len(alike) > 1:  # some rounded to more bits than others
            return self.graph.op("Concat", *(self.linear(x, prefix, *group, bias=bias) for group in alike), axis=-1)
        name = f"{prefix}{'_'.join(names)}"
        sources = tuple(f"{prefix}{part}.weight" for part in names)
        self.watch(x, sources, self.spec.tensors[sources[0]][1])
        biases = tuple(f"{prefix}{part}.bias" for part in names) if bias else ()
        return self._product(x, name, sources, biases)

    def head(self, x: ir.Value) -> ir.Value:
        """Multiply [K, H] by the head, which may be the embedding, to [K, vocabulary]."""
        name = "embed" if self.spec.tied else "head"
        return self._product(x, name, (f"{name}.weight",), ("head.bias",) if self.spec.head_bias else ())

    def _scheme(self, source: str) -> Scheme | None:
        return None if self.form.scheme is None else self.form.scheme.of(source, self.spec.tensors[source])

    def _product(self, x: ir.Value, name: str, sources: tuple[str, ...], biases: tuple[str, ...]) -> ir.Value:
        graph, scheme = self.graph, self._scheme(sources[0])
        rows = sum(self.spec.tensors[source][0] for source in sources)
        columns = self.spec.tensors[sources[0]][1]
        summand = graph.weight(f"{name}.bias", [rows], Recipe("rows", biases)) if biases else None
        if scheme is None:
            weight = graph.weight(f"{name}.weight", [rows, columns], Recipe("rows", sources))
            product = graph.op("FusedMatMul", x, weight, transB=1)
            return product if summand is None else graph.op("Add", product, summand)
        codes, scales, zeros = self._quantized(name, sources, scheme)
        return graph.op(
            "MatMulNBits",
            x,
            codes,
            scales,
            zeros,
            None,
            summand,
            K=columns,
            N=rows,
            bits=scheme.bits,
            block_size=scheme.block,
            accuracy_level=self.form.accuracy_level,
        )

    def rows_of(self, name: str, at: ir.Value) -> ir.Value:
        """Look up rows [...] of a table of the model, [..., width]."""
        graph, source = self.graph, f"{name}.weight"
        scheme, width = self._scheme(source), self.spec.tensors[source][1]
        if scheme is None:
            return graph.op("Gather", graph.weight(source, self.spec.tensors[source], Recipe("rows", (source,))), at)
        codes, scales, zeros = self._quantized(f"{name}.table", (source,), scheme, flat=True)
        sizes = {"bits": scheme.bits, "block_size": scheme.block}
        found = graph.op("GatherBlockQuantized", codes, at, scales, zeros, gather_axis=0, quantize_axis=1, **sizes)
        if width % scheme.block == 0:
            return found
        return graph.op("Slice", found, *(graph.constant([number]) for number in (0, width, -1)))

    def _quantized(
        self, name: str, sources: tuple[str, ...], scheme: Scheme, *, flat: bool = False
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Return codes, scales and zero points of matrices, one below the other; a row of codes in blocks or flat."""
        graph, bytes_ = self.graph, ir.DataType.UINT8
        rows = sum(self.spec.tensors[source][0] for source in sources)
        blocks, size = -(-self.spec.tensors[sources[0]][1] // scheme.block), scheme.block * scheme.bits // 8
        shape = [rows, blocks * size] if flat else [rows, blocks, size]
        codes = graph.weight(f"{name}.codes", shape, Recipe("codes flat" if flat else "codes", sources), bytes_)
        scales = graph.weight(f"{name}.scales", [rows, blocks], Recipe("scales", sources))
        if scheme.symmetric:
            return codes, scales, None
        packed = -(-blocks * scheme.bits // 8)
        return codes, scales, graph.weight(f"{name}.zeros", [rows, packed], Recipe("zeros", sources), bytes_)

    def norm(self, x: ir.Value, norm: NormSpec | None, name: str, width: int) -> ir.Value:
        """Normalize the last dimension of x, of this width; None leaves it as it is."""
        if norm is None:
            return x
        if self._precise(name) and self.graph.dtype != ir.DataType.FLOAT:
            return self.graph.cast(
                self._norm(self.graph.cast(x, ir.DataType.FLOAT), norm, name, width), self.graph.dtype
            )
        return self._norm(x, norm, name, width)

    def _norm(self, x: ir.Value, norm: NormSpec, name: str, width: int) -> ir.Value:
        weight = self._factors(norm, name, width)
        if norm.kind == "layer":
            bias = None
            if norm.bias:
                recipe = Recipe("rows", (f"{name}.bias",))
                bias = self.graph.weight(f"{name}.bias", [width], recipe, self._norm_dtype(name))
            return self.graph.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=norm.eps)
        return self.graph.op("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=norm.eps, stash_type=1)

    def _precise(self, name: str) -> bool:
        """Whether a norm is float32 in any precision."""
        return self.spec.keeps_precision(f"{name}.weight")

    def _norm_dtype(self, name: str) -> ir.DataType:
        return ir.DataType.FLOAT if self._precise(name) else self.graph.dtype

    def norm_per_head(self, x: ir.Value, norm: NormSpec, name: str, heads: int, width: int) -> ir.Value:
        """Normalize each head of x [..., heads, width], with factors of its own."""
        normed = self.norm(x, replace(norm, weight=False), name, width)
        if not norm.weight:
            return normed
        factors = self.graph.weight(f"{name}.weight", [heads, width], self._recipe(norm, name))
        return self.graph.op("Mul", normed, factors)

    def add_and_norm(self, x: ir.Value, more: ir.Value, norm: NormSpec | None, name: str) -> tuple[ir.Value, ir.Value]:
        """Return x + more, and that normalized."""
        width = self.spec.hidden_size
        wide = self._precise(name) and self.graph.dtype != ir.DataType.FLOAT
        if norm is not None and norm.kind == "rms" and not wide:
            weight = self._factors(norm, name, width)
            outs = self.graph.ops("SkipSimplifiedLayerNormalization", 4, x, more, weight, epsilon=norm.eps)
            outs[1].name = outs[2].name = ""  # mean and deviation, which nobody needs
            return outs[3], outs[0]
        total = self.graph.op("Add", x, more)
        return total, self.norm(total, norm, name, width)

    def _factors(self, norm: NormSpec, name: str, width: int) -> ir.Value:
        if not norm.weight:
            return self.graph.constant(np.ones(width), self._norm_dtype(name).numpy())
        return self.graph.weight(f"{name}.weight", [width], self._recipe(norm, name), self._norm_dtype(name))

    def _recipe(self, norm: NormSpec, name: str) -> Recipe:
        return Recipe("rows" if norm.offset == 0 else f"plus {norm.offset!r}", (f"{name}.weight",))
