"""llama.cpp as a `ModelRunner`: any mix of prompts and generated tokens is one call."""

__all__ = ["LlamaCppRunner"]

from collections.abc import Sequence

import llama_cpp
import numpy as np
import torch
from torch import Tensor

from xinfer import BackendContext, Batch, ModelRunner, RunnerInfo
from xinfer.devices import cache_budget
from xinfer.errors import ConfigError, DeviceError
from xinfer_llamacpp.native import Native

_ELEMENT = {"float16": 2, "float32": 4}


class LlamaCppRunner(ModelRunner):
    """Runs a GGUF file, a block being a whole sequence, which is a sequence of llama.cpp's."""

    def __init__(self, context: BackendContext) -> None:
        limits, config, spec = context.limits, context.config, context.model.spec
        longest = spec.context_len(limits.max_model_len)
        token_bytes = spec.kv_token_elements * _ELEMENT[config.kv_dtype]
        rows, tokens = _cache_size(context, longest, token_bytes)
        self._native = Native(context.model.files[0], config, rows, tokens, limits.max_num_batched_tokens)
        windows = [layer.attention.window for layer in spec.layers if layer.attention.window is not None]
        if windows and not self._native.window and longest > min(windows):
            self._native.close()
            raise ConfigError(
                f"{context.model.path}: layers see {min(windows)} tokens, which llama.cpp leaves out for this kind of "
                f"model: take engine.max_model_len={min(windows)} at most, or backend=eager"
            )
        self._filled = np.zeros(rows, np.int64)
        self.info = RunnerInfo(
            vocab_size=self._native.vocab_size,
            max_model_len=longest,
            block_size=longest,
            num_blocks=rows,
            kv_tokens=tokens,
            threads=self._native.threads,
            resident_weight_bytes=self._native.weight_bytes,
            kv_cache_bytes=tokens * token_bytes,
            step_read_bytes=self._native.weight_bytes * spec.step_read_parameters // spec.parameters,
            kv_token_bytes=token_bytes,
            notes=(f"llama.cpp, {self._native.description}", f"the KV cache is {config.kv_dtype}"),
            capabilities=frozenset({"copy", "free"}),
        )

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        lengths, rows = np.diff(batch.query_starts), batch.block_tables[:, 0]
        begins = batch.context_lens - lengths
        for s in np.flatnonzero(self._filled[rows] > begins):  # another's tokens, or guesses that were wrong
            self._native.cut(int(rows[s]), int(begins[s]))
        self._filled[rows] = batch.context_lens
        owners = np.repeat(rows, lengths)
        return torch.from_numpy(self._native.decode(batch.token_ids, batch.positions, owners, batch.sample_at))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        self._native.cut(target, 0)
        self._native.copy(source, target, tokens)
        self._filled[target] = tokens

    def free(self, blocks: Sequence[int]) -> None:
        """See `ModelRunner.free`."""
        for block in blocks:
            self._native.cut(block, 0)
            self._filled[block] = 0

    def close(self) -> None:
        """Give back the memory."""
        self._native.close()


def _cache_size(context: BackendContext, longest: int, token_bytes: int) -> tuple[int, int]:
    """Return how many rows the cache gets, more than may run so that some keep prompts, and tokens of all of them."""
    limits, spec, most = context.limits, context.model.spec, llama_cpp.llama_max_parallel_sequences()
    if limits.max_num_seqs > most:
        raise ConfigError(f"engine.max_num_seqs={limits.max_num_seqs}: llama.cpp runs at most {most} sequences")
    room = int(cache_budget(limits, longest * token_bytes, torch.device("cpu")) // token_bytes)
    rows, tokens = min(2 * limits.max_num_seqs, most), min(room, longest * limits.max_num_seqs)
    if not context.config.kv_unified:
        whole = -(-longest // 256) * 256  # as llama.cpp rounds it
        rows = min(rows, room // whole)
        tokens = rows * whole
    elif longest <= spec.default_len < spec.max_model_len:
        tokens = min(tokens, spec.default_len)  # a longer cache would turn all positions otherwise
    if tokens < 2:
        raise DeviceError(
            f"the KV cache gets memory for {room} tokens of {token_bytes} bytes, which is too little: raise "
            "engine.kv_memory, or lower engine.max_model_len"
        )
    return rows, tokens
