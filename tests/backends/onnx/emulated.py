"""ONNX Runtime's own operators in NumPy, written from their documentation, and a session on top of them.

Source: docs/ContribOperators.md and docs/contrib_ops/cuda/paged_attention.md of onnxruntime, its operators' schemas,
and what paged_attention_helper.h refuses, which is refused here too. The session stands in for CUDA's: it reads and
writes what is bound by its address.
"""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

TYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 10: np.float16, 16: ml_dtypes.bfloat16}
NAMES = {1: "float", 6: "int32", 7: "int64", 10: "float16", 16: "bfloat16"}


def wide(x):
    return np.asarray(x, np.float32)


def rotated(x, cos, sin, interleaved):
    """Turn the first dimensions of x [T, heads, D] by cos and sin [T, dim / 2]."""
    cos, sin, x = wide(cos)[:, None], wide(sin)[:, None], wide(x)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    one, two = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    parts = (one * cos - two * sin, two * cos + one * sin)
    joined = np.stack(parts, -1).reshape(turned.shape) if interleaved else np.concatenate(parts, -1)
    return np.concatenate([joined, rest], -1)


class PagedAttention(OpRun):
    op_domain = "com.microsoft"
    steps: list = []  # noqa: RUF012  what nodes were told of lengths

    def _run(
        self,
        query,
        key,
        value,
        key_cache,
        value_cache,
        starts,
        past,
        table,
        cos=None,
        sin=None,
        slots=None,
        sinks=None,
        q_norm=None,
        k_norm=None,
        k_scale=None,
        v_scale=None,
        bounds=None,
        **attributes,
    ):
        heads, groups, scale = attributes["num_heads"], attributes["kv_num_heads"], attributes["scale"]
        latent = attributes.get("kv_cache_layout") == "LATENT"
        assert query.ndim == 2 and q_norm is k_norm is k_scale is v_scale is None
        if latent:
            assert groups == 1 and value is None and value_cache is None and sinks is None and scale
            q, k, v = query, key, None
        elif key is None:
            width = query.shape[1] // (heads + 2 * groups)
            q, k, v = np.split(query, [heads * width, (heads + groups) * width], 1)
        else:
            q, k, v = query, key, value
        tokens, width = len(q), q.shape[1] // heads
        narrow = attributes.get("v_head_size") or width
        assert width % 8 == 0 and (narrow == width or latent)
        blocks, block = key_cache.shape[:2]
        assert key_cache.shape == (blocks, block, groups, width) and key_cache.dtype == query.dtype
        assert block >= 16 and block & (block - 1) == 0
        assert starts.shape == (len(past) + 1,) and table.shape[0] == len(past) and slots.shape == (tokens,)
        assert all(each.dtype == np.int32 for each in (starts, past, table, slots, bounds))
        assert starts[0] == 0 and starts[-1] == tokens
        lengths = np.diff(starts)
        whole = past + lengths
        assert lengths.max() <= bounds[0] and whole.max() <= bounds[1] and bounds[2] <= whole.max()
        assert whole.max() <= table.shape[1] * block
        self.steps.append((tokens, len(past), *bounds.tolist()))

        positions = np.concatenate([np.arange(a, b) for a, b in zip(past, whole, strict=True)])
        q, k = wide(q).reshape(tokens, heads, width), wide(k).reshape(tokens, groups, width)
        if attributes.get("do_rotary"):
            assert cos.dtype == query.dtype and cos.shape[1] % 8 == 0 and cos.shape[1] <= width // 16 * 8
            turn = cos[positions], sin[positions], attributes.get("rotary_interleaved", 0)
            q, k = (rotated(x, *turn).astype(query.dtype) for x in (q, k))
        for token, slot in enumerate(slots):
            if slot >= 0:
                key_cache[slot // block, slot % block] = k[token]
                if not latent:
                    value_cache[slot // block, slot % block] = v[token].reshape(groups, width)
        out = np.zeros((tokens, heads, narrow), np.float32)
        window, cap = attributes.get("local_window_size", -1), attributes.get("softcap", 0.0)
        for token, position in enumerate(positions):
            row = int(np.searchsorted(starts, token, "right")) - 1
            seen = np.arange(max(0, position + 1 - window) if window > 0 else 0, position + 1)
            at = table[row, seen // block]
            keys = wide(key_cache[at, seen % block]).repeat(heads // groups, 1)  # [L, heads, width]
            values = keys[..., :narrow] if latent else wide(value_cache[at, seen % block]).repeat(heads // groups, 1)
            scores = np.einsum("hd,lhd->hl", wide(q[token]), keys) * scale
            if cap:
                scores = np.tanh(scores / cap) * cap
            rest = np.full((heads, 1), -np.inf) if sinks is None else wide(sinks)[:, None]
            most = np.maximum(scores.max(1, keepdims=True), rest)
            weights = np.exp(scores - most)
            weights /= weights.sum(1, keepdims=True) + np.exp(rest - most)
            out[token] = np.einsum("hl,lhd->hd", weights, values)
        return (out.reshape(tokens, -1).astype(query.dtype),)


class SimplifiedLayerNormalization(OpRun):
    op_domain = ""

    def _run(self, x, scale, axis=None, epsilon=None, stash_type=None):
        assert axis == -1 and x.dtype == scale.dtype
        y = wide(x) / np.sqrt(np.mean(wide(x) ** 2, -1, keepdims=True) + epsilon)
        return ((y * wide(scale)).astype(x.dtype),)


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, skip, gamma, epsilon=None):
        assert x.dtype == skip.dtype == gamma.dtype and x.shape == skip.shape
        total = (wide(x) + wide(skip)).astype(x.dtype)
        y = wide(total) / np.sqrt(np.mean(wide(total) ** 2, -1, keepdims=True) + epsilon)
        nothing = np.zeros(1, np.float32)
        return ((y * wide(gamma)).astype(x.dtype), nothing, nothing, total)


class QuickGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, alpha=None):
        return ((wide(x) / (1 + np.exp(-alpha * wide(x)))).astype(x.dtype),)


class FusedMatMul(OpRun):
    op_domain = "com.microsoft"

    def _run(self, a, b, transB=None):
        assert transB == 1 and a.dtype == b.dtype
        return ((wide(a) @ wide(b).T).astype(a.dtype),)


class RotaryEmbedding(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, positions, cos, sin, interleaved=None, num_heads=None, rotary_embedding_dim=None):
        rows, tokens, _ = x.shape
        assert rows == 1 and positions.shape == (1, tokens) and positions.dtype == np.int64 and cos.dtype == x.dtype
        assert 2 * cos.shape[1] == rotary_embedding_dim
        turned = rotated(x.reshape(tokens, num_heads, -1), cos[positions[0]], sin[positions[0]], interleaved)
        return (turned.reshape(x.shape).astype(x.dtype),)


class MoE(OpRun):
    """Experts, weighed by a softmax over the k largest of the router's numbers; rows of gate and up in turns."""

    op_domain = "com.microsoft"

    def _run(
        self,
        x,
        router,
        first,
        first_bias,
        second,
        second_bias=None,
        activation_alpha=None,
        activation_beta=None,
        activation_type=None,
        k=None,
        normalize_routing_weights=None,
        swiglu_fusion=None,
        swiglu_limit=None,
    ):
        assert normalize_routing_weights == 1
        tokens, logits = wide(x).reshape(-1, x.shape[-1]), wide(router)
        out = np.zeros_like(tokens)
        for row, (token, scores) in enumerate(zip(tokens, logits, strict=True)):
            chosen = np.argsort(-scores, kind="stable")[:k]
            weights = np.exp(scores[chosen] - scores[chosen].max())
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                inner = wide(first[expert]) @ token
                if first_bias is not None:
                    inner = inner + wide(first_bias[expert])
                if activation_type == "swiglu":
                    assert swiglu_fusion == 1
                    gate, up = inner[0::2], inner[1::2]
                    if swiglu_limit is not None:
                        gate, up = np.minimum(gate, swiglu_limit), np.clip(up, -swiglu_limit, swiglu_limit)
                    inner = gate / (1 + np.exp(-activation_alpha * gate)) * (up + activation_beta)
                elif activation_type == "relu":
                    inner = np.maximum(inner, 0)
                elif activation_type == "silu":
                    inner = inner / (1 + np.exp(-inner))
                else:
                    inner = inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))) / 2
                result = wide(second[expert]) @ inner
                out[row] += weight * (result if second_bias is None else result + wide(second_bias[expert]))
        return (out.reshape(x.shape).astype(x.dtype),)


class GatherElements(OpRun):
    """The standard's own: the evaluator's takes no negative axis."""

    op_domain = ""

    def _run(self, data, indices, axis=None):
        return (np.take_along_axis(data, indices, axis),)


OPERATORS = [
    GatherElements,
    MoE,
    PagedAttention,
    SimplifiedLayerNormalization,
    SkipSimplifiedLayerNormalization,
    QuickGelu,
    FusedMatMul,
    RotaryEmbedding,
]


def at(kind, shape, place):
    """Return what lies at an address."""
    kind = np.dtype(TYPES.get(kind, kind) if isinstance(kind, int) else kind)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_byte * size).from_address(place), kind).reshape(shape)


class Binding:
    def __init__(self):
        self.inputs, self.output, self.captured = {}, None, False

    def bind_input(self, name, device, number, kind, shape, place):
        assert not self.captured and device == "cpu"
        self.inputs[name] = (kind, shape, place)

    def bind_cpu_input(self, name, array):
        assert not self.captured
        self.inputs[name] = array

    def bind_output(self, name, device, number, kind, shape, place):
        assert name == "logits" and not self.captured
        self.output = (kind, shape, place)


class Session:
    """Computes what is bound; `graphs` are the numbers of captured graphs that ran."""

    def __init__(self, path):
        self.model = onnx.load(path)
        for node in self.model.graph.node:  # the evaluator would keep outputs that nobody needs as absent inputs
            for number, name in enumerate(node.output):
                node.output[number] = name or f"{node.output[0]}_unused_{number}"
        self.evaluator = ReferenceEvaluator(self.model, new_ops=OPERATORS)
        self.graphs: list[int] = []

    def get_inputs(self):
        given = [(each.name, each.type.tensor_type.elem_type) for each in self.model.graph.input]
        return [SimpleNamespace(name=name, type=f"tensor({NAMES[kind]})") for name, kind in given]

    def io_binding(self):
        return Binding()

    def run_with_iobinding(self, binding, options):
        number = int(options.get_run_config_entry("gpu_graph_id"))
        binding.captured = number >= 0
        self.graphs.append(number)
        feeds = {name: at(*each) if isinstance(each, tuple) else each for name, each in binding.inputs.items()}
        assert feeds.keys() == {each.name for each in self.model.graph.input}
        logits = self.evaluator.run(["logits"], feeds)[0]
        place = at(*binding.output)
        assert logits.shape == place.shape and logits.dtype == np.float32
        place[...] = logits
