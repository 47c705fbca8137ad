"""Experts as nodes: a router, and a fused operator that computes those chosen.

The operator, com.microsoft.MoE or QMoE, has a router of its own: a softmax over the chosen of the numbers it is given.
It is given logarithms of weights, of which that softmax makes the weights again, and so is right for any router.

On one thread of two shared EPYC cores, 32 experts of 1024 x 512, 4 chosen, 1 / 64 tokens take (ms, 2026-11-30): MoE
1.5 / 41, nodes for each expert 1.2 / 21, all experts for every token 9 / 110, the chosen's matrices gathered 2.8 / -,
QMoE (4 bits, blocks of 32, int8) 0.2 / 22. But 24 layers of nodes for each expert take 42 s to load, and MoE none.
"""

__all__ = ["float_linear", "routed"]

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from xinfer.backends.onnx.linear import Writer
from xinfer.backends.onnx.recipe import Recipe
from xinfer.models.spec import ExpertsSpec, MlpSpec

Between = Callable[[ir.Value | None, ir.Value], ir.Value]

# The operators' words for what is between the matrices; of gated parts `_gating` says more.
_GATED = {"silu": "swiglu", "swiglu": "swiglu"}
_UNGATED = {"relu": "relu", "silu": "silu", "gelu_tanh": "gelu"}
_BITS = (2, 4, 8)  # of QMoE
_NEVER = -1e30  # logarithm of the weight of an expert that is not chosen: its exponential is 0
_LEAST = 1e-37  # weights below are taken for this: their logarithm has to be a number


def float_linear(writer: Writer, x: ir.Value, name: str, *, bias: bool = False) -> ir.Value:
    """Multiply [..., in] by a small matrix that is never quantized, in float32, to [..., out] float32."""
    graph, kind = writer.graph, ir.DataType.FLOAT
    tensors = writer.spec.tensors
    weight = graph.weight(f"{name}.weight", tensors[f"{name}.weight"], Recipe("float", (f"{name}.weight",)), kind)
    product = graph.op("FusedMatMul", _cast(writer, x, kind), weight, transB=1)
    if not bias:
        return product
    summand = graph.weight(f"{name}.bias", tensors[f"{name}.bias"], Recipe("float", (f"{name}.bias",)), kind)
    return graph.op("Add", product, summand)


def routed(writer: Writer, x: ir.Value, spec: MlpSpec, prefix: str, between: Between) -> ir.Value:
    """Write a router and its experts, [B, S, H] to [B, S, H].

    Args:
        writer: where it is written.
        x: what is routed.
        spec: a part with experts.
        prefix: of its tensors' names.
        between: writes what is done with gate (None if there is none) and up, [..., size] each.
    """
    graph, experts = writer.graph, spec.experts
    assert experts is not None
    scores, weights, chosen = _route(writer, x, experts, prefix)
    kind = (_GATED if spec.gated else _UNGATED).get(spec.activation)
    if kind is None:
        each = _cast(writer, _spread(writer, scores, chosen, weights, 0.0), graph.dtype)
        out = _all(writer, x, spec, prefix, between, each)
    else:
        logs = graph.op("Log", graph.op("Max", weights, graph.constant(_LEAST, np.float32)))
        flat = graph.op("Reshape", _spread(writer, scores, chosen, logs, _NEVER), graph.constant([-1, experts.count]))
        out = _fused(writer, x, _cast(writer, flat, graph.dtype), spec, prefix, kind)
        if not experts.normalized:
            out = graph.op("Mul", out, _cast(writer, _sum(writer, weights, keepdims=1), graph.dtype))
    return out if experts.scale == 1 else graph.op("Mul", out, graph.number(experts.scale))


def _route(writer: Writer, x: ir.Value, spec: ExpertsSpec, prefix: str) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return all scores [B, S, count], weights but for their scale, and numbers of the chosen, [B, S, chosen]; float32.

    Of equal scores those of lower numbers are chosen. For torch any of them may be: its `topk` has no order of equals.
    """
    graph = writer.graph
    logits = float_linear(writer, x, f"{prefix}router", bias=spec.router_bias)
    scores = graph.op("Softmax", logits, axis=-1) if spec.score == "softmax" else _sigmoid(writer, logits)
    preferred = scores
    if spec.correction:
        recipe = Recipe("float", (f"{prefix}router.correction",))
        summand = graph.weight(f"{prefix}router.correction", [spec.count], recipe, ir.DataType.FLOAT)
        preferred = graph.op("Add", scores, summand)
    if spec.groups > 1:
        preferred = _in_best_groups(writer, preferred, spec)
    best, chosen = _top(writer, preferred, spec.chosen)
    weights = best if preferred is scores else graph.op("GatherElements", scores, chosen, axis=-1)
    if spec.normalized:
        weights = graph.op("Div", weights, _sum(writer, weights, keepdims=1))
    return scores, weights, chosen


def _sigmoid(writer: Writer, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x)): the operator of that name takes what is below -18 for -18."""
    graph = writer.graph
    exponential = graph.op("Exp", graph.op("Neg", x))
    return graph.op("Reciprocal", graph.op("Add", exponential, graph.constant(1, np.float32)))


def _in_best_groups(writer: Writer, preferred: ir.Value, spec: ExpertsSpec) -> ir.Value:
    """Return what experts are chosen by, [B, S, count]: minus infinity in groups that are out."""
    graph = writer.graph
    grouped = graph.op("Reshape", preferred, graph.constant([0, 0, spec.groups, -1]))
    best, _ = _top(writer, grouped, 1 if spec.group_score == "best" else 2)
    sums = _sum(writer, best, keepdims=0)
    _, groups = _top(writer, sums, spec.chosen_groups)
    zeros = graph.op("Expand", graph.constant(0, np.float32), graph.op("Shape", groups))
    out = _spread(writer, sums, groups, zeros, -np.inf)
    preferred = graph.op("Add", grouped, graph.op("Unsqueeze", out, graph.constant([-1])))
    return graph.op("Reshape", preferred, graph.constant([0, 0, spec.count]))


def _top(writer: Writer, x: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
    values, indices = writer.graph.ops("TopK", 2, x, writer.graph.constant([count]), axis=-1)
    return values, indices


def _spread(writer: Writer, like: ir.Value, chosen: ir.Value, values: ir.Value, otherwise: float) -> ir.Value:
    """Put values [B, S, chosen] where they belong among all experts, [B, S, count]."""
    graph = writer.graph
    base = graph.op("Expand", graph.constant(otherwise, np.float32), graph.op("Shape", like))
    return graph.op("ScatterElements", base, chosen, values, axis=-1)


def _sum(writer: Writer, x: ir.Value, keepdims: int) -> ir.Value:
    """Add up the last dimension."""
    return writer.graph.op("ReduceSum", x, writer.graph.constant([-1]), keepdims=keepdims)


def _cast(writer: Writer, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    return x if writer.graph.dtype == ir.DataType.FLOAT else writer.graph.op("Cast", x, to=int(dtype))


def _gating(spec: MlpSpec) -> dict[str, float | int]:
    """Return attributes of g * sigmoid(alpha * g) * (u + beta), g cut at a limit and u at both."""
    if not spec.gated:
        return {}
    if spec.activation == "silu":
        return {"swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
    cut = {} if math.isinf(spec.limit) else {"swiglu_limit": spec.limit}
    return {"swiglu_fusion": 1, "activation_alpha": spec.alpha, "activation_beta": 1.0, **cut}


def _fused(writer: Writer, x: ir.Value, logs: ir.Value, spec: MlpSpec, prefix: str, kind: str) -> ir.Value:
    """Compute experts, weighed by the exponentials of `logs` [B * S, count], made to sum to one."""
    graph, form, experts = writer.graph, writer.form, spec.experts
    assert experts is not None
    attributes: dict[str, float | int | str] = {
        "k": experts.chosen,
        "activation_type": kind,
        "normalize_routing_weights": 1,
        **_gating(spec),
    }
    ups = ("gate", "up") if spec.gated else ("up",)
    first, second = _Stack(writer, prefix, ups), _Stack(writer, prefix, ("down",))
    biases = [stack.plain("bias") if spec.bias else None for stack in (first, second)]
    if form.scheme is None or not (first.fits and second.fits):
        return graph.op(
            "MoE", x, logs, first.plain("weight"), biases[0], second.plain("weight"), biases[1], **attributes
        )
    codes, scales, zeros = zip(first.quantized(), second.quantized(), strict=True)
    return graph.op(
        "QMoE",
        *(x, logs, codes[0], scales[0], biases[0], codes[1], scales[1], biases[1], None, None, None, *zeros),
        expert_weight_bits=form.scheme.bits,
        block_size=form.scheme.block,
        accuracy_level=form.accuracy_level,
        **attributes,
    )


class _Stack:
    """Matrices of all experts as the operators take them: [count, rows, columns], rows of gate and up in turns.

    Attributes:
        fits: whether QMoE takes them quantized: a row has to end with a byte. Where it does not end with a block,
            QMoE dequantizes whole matrices in each call.
    """

    def __init__(self, writer: Writer, prefix: str, names: tuple[str, ...]) -> None:
        self._writer, self._form = writer, "interleaved" if len(names) > 1 else "rows"
        self._names = [f"{prefix}experts.{name}" for name in names]
        self._name = f"{prefix}experts.{'_'.join(names)}"
        self._count, rows, self._columns = writer.spec.tensors[f"{self._names[0]}.weight"]
        self._rows = rows * len(names)
        scheme = writer.form.scheme
        self.fits = scheme is not None and scheme.bits in _BITS and self._columns * scheme.bits % 8 == 0

    def _weight(self, part: str, kind: str, form: str, columns: list[int], dtype: ir.DataType | None) -> ir.Value:
        sources = tuple(f"{name}.{kind}" for name in self._names)
        shape = [self._count, self._rows, *columns]
        return self._writer.graph.weight(f"{self._name}.{part}", shape, Recipe(form, sources), dtype)

    def plain(self, kind: str) -> ir.Value:
        """Return `weight` [count, rows, columns] or `bias` [count, rows]."""
        return self._weight(kind, kind, self._form, [self._columns] if kind == "weight" else [], None)

    def quantized(self) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Return codes [count, rows, bytes], scales [count, rows, blocks] and zero points, if there are any.

        As MatMulNBits has them, but a row of codes is not filled up to a whole block. Recipes are `codes`, `scales` and
        `zeros`, followed by `interleaved` (gate and up) or `stack` (of one source).
        """
        scheme, form = self._writer.form.scheme, " interleaved" if self._form == "interleaved" else " stack"
        assert scheme is not None
        blocks, bytes_ = -(-self._columns // scheme.block), ir.DataType.UINT8
        codes = self._weight("codes", "weight", f"codes{form}", [self._columns * scheme.bits // 8], bytes_)
        scales = self._weight("scales", "weight", f"scales{form}", [blocks], None)
        if scheme.symmetric:
            return codes, scales, None
        packed = -(-blocks * scheme.bits // 8)
        return codes, scales, self._weight("zeros", "weight", f"zeros{form}", [packed], bytes_)


def _all(writer: Writer, x: ir.Value, spec: MlpSpec, prefix: str, between: Between, weights: ir.Value) -> ir.Value:
    """Compute every expert for every token, not quantized, for functions that the operators lack.

    No checkpoint is known to need it.
    """
    graph, experts = writer.graph, spec.experts
    assert experts is not None
    rows = graph.op("Reshape", x, graph.constant([1, -1, writer.spec.hidden_size]))
    up = _batched(writer, rows, f"{prefix}experts.up", spec.bias)
    gate = _batched(writer, rows, f"{prefix}experts.gate", spec.bias) if spec.gated else None
    computed = _batched(writer, between(gate, up), f"{prefix}experts.down", spec.bias)  # [count, B * S, H]
    flat = graph.op("Reshape", weights, graph.constant([1, -1, experts.count]))
    each = graph.op("Transpose", flat, perm=[2, 1, 0])
    out = graph.op("ReduceSum", graph.op("Mul", computed, each), graph.constant([0]), keepdims=0)
    return graph.op("Reshape", out, graph.op("Shape", x))


def _batched(writer: Writer, x: ir.Value, name: str, bias: bool) -> ir.Value:
    """Multiply [1 or count, T, in] by each expert's matrix, to [count, T, out]."""
    graph = writer.graph
    count, rows, columns = writer.spec.tensors[f"{name}.weight"]
    weight = graph.weight(f"{name}.weight", [count, rows, columns], Recipe("rows", (f"{name}.weight",)))
    product = graph.op("FusedMatMul", x, weight, transB=1)
    if not bias:
        return product
    summand = graph.weight(f"{name}.bias", [count, rows], Recipe("rows", (f"{name}.bias",)))
    return graph.op("Add", product, graph.op("Unsqueeze", summand, graph.constant([1])))
