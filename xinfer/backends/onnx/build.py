"""From a model to a session and its cache: what an `OnnxRunner` is made of."""

__all__ = ["Built", "build", "opened"]

import logging
import math
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import onnxruntime as ort
import torch

from xinfer.backends import BackendContext
from xinfer.backends.onnx.attention import head_width
from xinfer.backends.onnx.cached import graph_for
from xinfer.backends.onnx.calibrated import is_scale, kv_scales
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.operators import takes
from xinfer.backends.onnx.providers import CPU, Providers
from xinfer.backends.onnx.rows import Rows
from xinfer.backends.onnx.session import cores, open_session
from xinfer.backends.onnx.weights import made
from xinfer.devices import cache_budget, choose_dtype
from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Limits
from xinfer.errors import ConfigError, DeviceError
from xinfer.hardware import gibibytes
from xinfer.models.quantize import Scheme
from xinfer.models.reader import give_back
from xinfer.process_memory import use_huge_pages

log = logging.getLogger(__name__)

_SPARE = 2  # rows for each sequence that may run: others keep prompts that may come again


@dataclass(frozen=True, slots=True)
class Built:
    """What a runner is made of."""

    session: ort.InferenceSession
    rows: Rows
    form: Form
    info: RunnerInfo


def build(context: BackendContext, providers: Providers) -> Built:
    """Write the graph, load it with the model's weights, and reserve the cache."""
    spec, limits = context.model.spec, context.limits
    if choose_dtype(context.model.dtype, torch.device("cpu")) != torch.float32:
        raise ConfigError(
            f"model.dtype={context.model.dtype}: backend=onnx computes in float32 on the CPU: leave it out, and for "
            "fewer bytes take model.quantization=int8 or int4"
        )
    kv_dtype = context.config.kv_dtype or "float32"
    ragged = takes("GroupQueryAttention", "query_seqlens") and all(name == CPU for name, _ in providers)
    form = Form(
        spec.context_len(limits.max_model_len),
        scheme=context.model.quantization,
        accuracy_level=context.config.accuracy_level,
        kv_dtype=kv_dtype,
        ragged=ragged,
    )
    session, resident = opened(context, form, providers)
    dtype: torch.dtype = getattr(torch, kv_dtype)
    heads = [(layer.attention.kv_heads, head_width(layer.attention)) for layer in spec.layers for _ in range(2)]
    token_bytes = sum(groups * width for groups, width in heads) * dtype.itemsize
    tokens = cache_tokens(limits, form.max_len, token_bytes)
    rows = Rows(heads, _SPARE * limits.max_num_seqs, form.max_len, dtype)
    return Built(
        session,
        rows,
        form,
        RunnerInfo(
            vocab_size=spec.vocab_size,
            max_model_len=form.max_len,
            block_size=form.max_len,
            num_blocks=rows.count,
            kv_tokens=tokens,
            device="cpu",
            dtype=form.dtype,
            threads=_threads(context),
            resident_weight_bytes=resident,
            kv_cache_bytes=tokens * token_bytes,
            step_read_bytes=spec.step_read(partial(_stored_bytes, form.scheme)),
            kv_token_bytes=token_bytes,
            notes=() if dtype == torch.float32 else (f"the KV cache is {kv_dtype}",),
            capabilities=frozenset({"copy", "free", "layers"}),
        ),
    )


def opened(context: BackendContext, form: Form, providers: Providers) -> tuple[ort.InferenceSession, int]:
    """Return a graph with the model's weights in it, and how many bytes these are."""
    started = perf_counter()
    path, recipes = graph_for(context.model.spec, form)
    threads = _threads(context)
    opens = partial(open_session, providers=providers, threads=threads)
    own = {name: each for name, each in recipes.items() if not is_scale(each)}
    weights = dict(made(context.model, own, form, threads))
    if form.kv_dtype == "int8":
        weights |= kv_scales(context.model, form, recipes, weights, opens)
    resident = sum(each.numel() * each.element_size() for each in weights.values())
    read = perf_counter()
    session = opens(path, weights)
    del weights
    give_back()
    if context.config.huge_pages:
        use_huge_pages(resident)
    log.info(
        "session ready", extra={"weights_s": read - started, "session_s": perf_counter() - read, "bytes": resident}
    )
    return session, resident


def _threads(context: BackendContext) -> int:
    return context.config.threads or cores()


def _stored_bytes(scheme: Scheme | None, name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor, rounded by the scheme if it is one of those."""
    own = None if scheme is None else scheme.of(name, shape)
    return 4 * math.prod(shape) if own is None else own.nbytes(shape)


def cache_tokens(limits: Limits, longest: int, token_bytes: int) -> int:
    """Return how many tokens the cache may hold: what all sequences could fill, within what memory allows."""
    budget = cache_budget(limits, longest * token_bytes, torch.device("cpu"))
    tokens = min(int(budget // token_bytes), longest * limits.max_num_seqs)
    if tokens < 2:
        raise DeviceError(
            f"the KV cache gets {gibibytes(budget)}, too little for even two tokens ({token_bytes} bytes each): raise "
            "engine.kv_memory, or lower engine.max_model_len or engine.max_num_seqs"
        )
    return tokens
