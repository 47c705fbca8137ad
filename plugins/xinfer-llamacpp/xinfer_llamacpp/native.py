"""llama.cpp's C interface, as far as it is needed: a model with a context, batches into it, logits out of it."""

__all__ = ["Native"]

import ctypes
from collections import deque
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import psutil
from numpy.typing import NDArray

from xinfer.errors import ModelError, XinferError
from xinfer_llamacpp import LlamaCppConfig

_KV_TYPES = {"float16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}
_FLASH_ATTENTION = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_ERROR = 4  # of the levels in ggml.h: debug, info, warning, error from 1 on
_said: deque[str] = deque(maxlen=3)  # the last errors; llama.cpp tells reasons only to its log


@llama_cpp.llama_log_callback
def _listen(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR:
        _said.append(text.decode(errors="replace").strip())


class Native:
    """A model and its context. Each row of the cache is a sequence of llama.cpp's.

    Args:
        path: the file, or its first part.
        config: the backend's.
        rows, tokens: of the cache.
        batch: tokens that one call may bring at most.

    Attributes:
        vocab_size, threads: width of a row of logits; with how many threads it computes.
        weight_bytes: as the file has them.
        window: tokens that layers with a window attend to, 0 where llama.cpp knows of none.
        description: what llama.cpp calls the model.
    """

    def __init__(self, path: Path, config: LlamaCppConfig, rows: int, tokens: int, batch: int) -> None:
        llama_cpp.llama_log_set(_listen, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        _said.clear()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise ModelError(f"{path}: llama.cpp can't load it ({'; '.join(_said)}): take backend=eager")
        self._context = llama_cpp.llama_init_from_model(self._model, _context_options(config, rows, tokens, batch))
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise ModelError(f"{path}: llama.cpp makes no context for it ({'; '.join(_said)}): see its keys")
        self._most: int = llama_cpp.llama_n_batch(self._context)
        self._unified = config.kv_unified
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.weight_bytes: int = llama_cpp.llama_model_size(self._model)
        self.threads: int = llama_cpp.llama_n_threads(self._context)
        self.window: int = llama_cpp.llama_model_n_swa(self._model)
        llama_cpp.llama_model_desc(self._model, text := ctypes.create_string_buffer(256), 256)
        self.description = text.value.decode(errors="replace")

    def decode(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        rows: NDArray[np.int32],
        sample_at: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Compute tokens [T], each of a row of the cache; return logits [K, vocab_size] of those at `sample_at`."""
        count = len(token_ids)
        assert count <= self._most, f"{count} tokens in a step, {self._most} were said to be the most"
        owners, ones, flags = rows.astype(np.int32), np.ones(count, np.int32), np.zeros(count, np.int8)
        flags[sample_at] = 1
        pointers = owners.ctypes.data + np.arange(count, dtype=np.uintp) * owners.itemsize
        batch = llama_cpp.llama_batch(
            n_tokens=count,
            token=_pointer(token_ids, ctypes.c_int32),
            pos=_pointer(positions, ctypes.c_int32),
            n_seq_id=_pointer(ones, ctypes.c_int32),
            seq_id=_pointer(pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(flags, ctypes.c_int8),
        )
        if code := llama_cpp.llama_decode(self._context, batch):
            raise XinferError(f"llama_decode returned {code} ({'; '.join(_said)})")
        outputs = np.flatnonzero(flags)
        if not len(outputs):
            return np.empty((0, self.vocab_size), np.float32)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (len(outputs), self.vocab_size))
        return logits[np.searchsorted(outputs, sample_at)]

    def cut(self, row: int, tokens: int) -> None:
        """Forget what a row holds beyond its first tokens."""
        llama_cpp.llama_memory_seq_rm(self._memory, row, tokens, -1)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Let an empty row have the first tokens of another; where rows share no cells, all is copied and then cut."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, tokens if self._unified else -1)
        self.cut(target, tokens)

    def close(self) -> None:
        """Give back the memory."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _context_options(config: LlamaCppConfig, rows: int, tokens: int, batch: int) -> Any:
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_seq_max, options.kv_unified = tokens, rows, config.kv_unified
    options.n_batch = max(batch, rows)  # it aborts where not all sequences have room in a batch
    options.n_ubatch = min(config.ubatch, options.n_batch)
    options.n_outputs_max = options.n_outputs_max_per_seq = 0  # any of a batch's tokens may have logits
    options.n_threads = options.n_threads_batch = config.threads or psutil.cpu_count(logical=False) or 1
    options.type_k = options.type_v = _KV_TYPES[config.kv_dtype]
    options.flash_attn_type = _FLASH_ATTENTION[config.flash_attention]
    return options


def _pointer(values: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(np.ascontiguousarray(values).ctypes.data, ctypes.POINTER(kind))
