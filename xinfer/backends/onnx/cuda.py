"""The graph as a `ModelRunner` on CUDA: a cache in blocks, and captured graphs for steps that only decode.

A step's arrays go to the device as one copy into memory that stays where it is. Weights and cache are torch's memory,
bound by their addresses once; the session computes on a stream of ours, so that nothing waits but the device.
"""

__all__ = ["CudaRunner", "bucket"]

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx.attention import head_width
from xinfer.backends.onnx.cached import graph_for
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.paged import BLOCK
from xinfer.backends.onnx.providers import CUDA, Choice, Providers
from xinfer.backends.onnx.recipe import Recipe
from xinfer.backends.onnx.staging import Staging
from xinfer.backends.onnx.weights import make
from xinfer.devices import cache_budget, choose_dtype
from xinfer.engine.runner import ModelRunner, RunnerInfo
from xinfer.engine.types import Batch, Limits
from xinfer.errors import DeviceError
from xinfer.hardware import available_memory, gibibytes
from xinfer.models.reader import Reader
from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Weights

log = logging.getLogger(__name__)

_SHORT = 512  # tokens up to which the kernel does not split a sequence's keys among processors, paged_attention.cc
_MOST = 256  # sequences, of a captured graph
_KINDS = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}
_ELEMENTS: dict[torch.dtype, int] = {  # as ONNX numbers them
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.float16: 10,
    torch.bfloat16: 16,
}


def bucket(sequences: int) -> int:
    """Return for how many sequences a graph is captured that decodes so many."""
    return 1 << (sequences - 1).bit_length() if sequences <= 4 else -(-sequences // 8) * 8


def _new(kind: Any, *arguments: Any) -> Any:
    """Return a stream, or None where the device is none of CUDA's, as in tests."""
    return kind(*arguments) if arguments[0].type == "cuda" else None


def _run_options(graph: int) -> Any:
    """Return options to run, or capture, the graph of this number; -1 is none. Nobody waits for the device."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class CudaRunner(ModelRunner):
    """Runs a graph with a cache in blocks; any mix of prefill and decode is one call.

    Steps that compute one token of each sequence are padded to a `bucket`, whose work is captured when it is first
    needed and then launched as a whole: once for contexts up to `_SHORT` tokens and once for longer ones.
    """

    def __init__(self, context: BackendContext, choice: Choice) -> None:
        spec, limits, self.device = context.model.spec, context.limits, choice.device
        dtype = self._dtype(context.model.dtype)
        name = str(dtype).removeprefix("torch.")
        form = Form(max_len=spec.context_len(limits.max_model_len), dtype=name, kv_dtype=name, paged=True)
        started = perf_counter()
        path, recipes = graph_for(spec, form)
        self._stream: Any = _new(torch.cuda.Stream, self.device)
        self._session, self._captures = self._open(path, choice.providers)
        self._weights = self._read(context.model.weights, recipes, form, dtype)
        resident = sum(each.numel() * each.element_size() for each in self._weights.values())
        log.info("session ready", extra={"seconds": perf_counter() - started, "bytes": resident})
        self._cache = self._reserve(spec, limits, form.max_len, dtype)
        blocks = len(next(iter(self._cache.values())))
        cache_bytes = sum(each.numel() * each.element_size() for each in self._cache.values())
        most = min(bucket(limits.max_num_seqs), _MOST)
        self._staging = Staging(
            tokens=max(limits.max_num_batched_tokens, most),
            sequences=max(limits.max_num_seqs, most),
            rows=max(limits.logits_rows, most),
            width=-(-form.max_len // BLOCK),
            device=self.device,
        )
        self._kept = torch.empty(most, spec.vocab_size, device=self.device)  # logits of captured graphs
        self._inputs = {each.name for each in self._session.get_inputs()} & self._staging.places.keys()
        self._plain, self._options = self._bound(), _run_options(-1)
        self._bindings: dict[int, tuple[Any, Any]] = {}
        self._bounds: dict[int, NDArray[np.int32]] = {}  # which bindings point to
        self.info = RunnerInfo(
            vocab_size=spec.vocab_size,
            max_model_len=form.max_len,
            block_size=BLOCK,
            num_blocks=blocks,
            device=str(self.device),
            dtype=form.dtype,
            resident_weight_bytes=resident,
            kv_cache_bytes=cache_bytes,
            step_read_bytes=spec.step_read_parameters * dtype.itemsize,
            kv_token_bytes=cache_bytes // (blocks * BLOCK),
            notes=() if self._captures else ("no captured graphs",),
            capabilities=frozenset({"copy"}),
        )

    def _read(
        self, weights: Weights, recipes: Mapping[str, Recipe], form: Form, usual: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the graph's weights on the device, each in the precision that the graph gives it."""
        needed = weights.spec.weight_bytes(usual.itemsize)
        if needed > (free := available_memory(self.device)):
            raise DeviceError(
                f"the weights take {gibibytes(needed)}, but {self.device} has {gibibytes(free)} free: "
                "take a smaller model"
            )
        kinds = {each.name: _KINDS.get(each.type, usual) for each in self._session.get_inputs()}
        with torch.inference_mode(), Reader(weights, self.device, usual) as reader:
            return {
                name: make(recipe, reader, replace(form, dtype=str(kinds[name]).removeprefix("torch."))).to(self.device)
                for name, recipe in recipes.items()
            }

    def _reserve(self, spec: DecoderSpec, limits: Limits, longest: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the cache, by the graph's inputs [blocks, block size, G, D]."""
        shapes = {
            f"past_key_values.{index}.{part}": (layer.attention.kv_heads, head_width(layer.attention))
            for index, layer in enumerate(spec.layers)
            for part in (("key",) if layer.attention.latent is not None else ("key", "value"))
        }
        block_bytes = sum(heads * width for heads, width in shapes.values()) * dtype.itemsize * BLOCK
        whole = -(-longest // BLOCK)
        budget = cache_budget(limits, whole * block_bytes, self.device)
        blocks = min(int(budget // block_bytes), whole * limits.max_num_seqs)
        if blocks < 1:
            raise DeviceError(
                f"the KV cache gets {gibibytes(budget)}, too little for {BLOCK} tokens ({gibibytes(block_bytes)}): "
                "raise engine.kv_memory"
            )
        return {  # numbers all, as kernels multiply what is beyond a sequence's end by zero
            name: torch.zeros(blocks, BLOCK, *shape, dtype=dtype, device=self.device) for name, shape in shapes.items()
        }

    def _dtype(self, wanted: str) -> torch.dtype:
        dtype = choose_dtype(wanted, self.device)
        if dtype == torch.float32:
            raise DeviceError(
                "backend=onnx has no float32 on CUDA, its attention there takes halves: model.dtype=bfloat16"
            )
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.device) < (8, 0):
            raise DeviceError(f"{torch.cuda.get_device_name(self.device)} has no bfloat16: take model.dtype=float16")
        return dtype

    def _open(self, path: Path, providers: Providers) -> tuple[Any, bool]:
        """Return the session, and whether it captures graphs: what its provider can't, it computes without."""
        given = dict(providers)
        options = {
            "device_id": str(self.device.index or 0),
            "user_compute_stream": str(self._stream.cuda_stream if self._stream else 0),
            "arena_extend_strategy": "kSameAsRequested",
            "enable_cuda_graph": "1",
            **given[CUDA],
        }
        captures = options["enable_cuda_graph"].lower() in ("1", "true")
        rest = [(name, each) for name, each in providers if name != CUDA]
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        try:
            return self._session_of(path, settings, [(CUDA, options), *rest]), captures
        except Exception as error:  # the runtime's own are of no common kind
            if not captures:
                raise
            reason = " ".join(str(error).split())
            log.warning("steps are computed without captured graphs, so more slowly: %s", reason)
        return self._session_of(path, settings, [(CUDA, options | {"enable_cuda_graph": "0"}), *rest]), False

    def _session_of(self, path: Path, settings: Any, providers: Providers) -> Any:
        session = ort.InferenceSession(str(path), settings, providers=providers, enable_fallback=0)
        if CUDA not in session.get_providers():
            raise DeviceError(f"ONNX Runtime could not start {CUDA} on {self.device}: see what it said above")
        return session

    def _bound(self) -> Any:
        """Return a binding with weights and cache in it."""
        binding = self._session.io_binding()
        for name, tensor in {**self._weights, **self._cache}.items():
            self._bind(binding, name, tensor.dtype, tuple(tensor.shape), tensor.data_ptr())
        return binding

    def _bind(self, binding: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...], place: int) -> None:
        binding.bind_input(name, self.device.type, self.device.index or 0, _ELEMENTS[dtype], shape, place)

    def _bind_step(self, binding: Any, counts: tuple[int, int, int], bounds: Any, logits: Tensor) -> None:
        """Bind a step of so many tokens, sequences and rows of logits."""
        for name in self._inputs:
            self._bind(
                binding, name, self._staging.dtype(name), self._staging.shape(name, *counts), self._staging.places[name]
            )
        binding.bind_cpu_input("attention_metadata", bounds)
        shape = (counts[2], logits.shape[1])
        binding.bind_output("logits", self.device.type, self.device.index or 0, np.float32, shape, logits.data_ptr())

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        sequences, rows = len(batch.context_lens), len(batch.sample_at)
        decodes = len(batch.token_ids) == sequences == rows and bucket(sequences) <= len(self._kept)
        here = self._stream
        if here is not None:
            here.wait_stream(torch.cuda.current_stream(self.device))  # who may still read what is written now
        logits = self._decode(batch, bucket(sequences)) if self._captures and decodes else self._compute(batch)
        if here is not None:
            torch.cuda.current_stream(self.device).wait_stream(here)
        return self._kept[:rows].clone() if logits is self._kept else logits

    def _compute(self, batch: Batch) -> Tensor:
        """Return logits [K, vocabulary] of any step."""
        wanted = len(batch.sample_at)
        counts = len(batch.token_ids), len(batch.context_lens), max(1, wanted)  # kernels may not expect nothing
        logits = torch.empty(counts[2], self.info.vocab_size, device=self.device)
        longest = int(batch.context_lens.max())
        self._bounds[-1] = self._bounded(
            int(np.diff(batch.query_starts).max()), max(_SHORT, 1 << (longest - 1).bit_length())
        )
        self._bind_step(self._plain, counts, self._bounds[-1], logits)
        self._send(batch, counts[1])
        self._session.run_with_iobinding(self._plain, self._options)
        return logits[:wanted]

    def _bounded(self, new: int, longest: int) -> NDArray[np.int32]:
        """Return what is told of lengths: few different things, as cuDNN keeps a plan of its own for each."""
        return np.array([new, min(longest, self.info.max_model_len), (_SHORT + 1) * (longest > _SHORT)], np.int32)

    def _decode(self, batch: Batch, padded: int) -> Tensor:
        """Return logits [padded, vocabulary] of one token of each sequence, by a captured graph."""
        long = int(batch.context_lens.max()) > _SHORT
        number = 2 * padded + long
        if number not in self._bindings:
            self._bounds[number] = self._bounded(1, self.info.max_model_len if long else _SHORT)
            binding = self._bound()
            self._bind_step(binding, (padded, padded, padded), self._bounds[number], self._kept)
            self._bindings[number] = (binding, _run_options(number))
        self._send(batch, padded)
        self._session.run_with_iobinding(*self._bindings[number])
        return self._kept

    def _send(self, batch: Batch, padded: int) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._staging.send(batch, padded)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for tensor in self._cache.values():
                tensor[target, :tokens] = tensor[source, :tokens]

    def metrics(self) -> Mapping[str, Any]:
        """See `ModelRunner.metrics`; memory is that of weights and cache, without what the session works in."""
        return {"mem_used": torch.cuda.memory_allocated(self.device)} if self._stream is not None else {}

    def close(self) -> None:
        """Give back the memory."""
        if self._stream is not None:
            self._stream.synchronize()
        self._bindings.clear()
        del self._plain, self._session, self._weights, self._cache, self._staging, self._kept
        if self._stream is not None:
            torch.cuda.empty_cache()
