"""transformers' model as a `ModelRunner`: prompts one by one, the next tokens of all sequences together."""

__all__ = ["TransformersRunner"]

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from xinfer import BackendContext, Batch, ModelRunner, RunnerInfo
from xinfer.devices import cache_budget, choose_device, choose_dtype
from xinfer.errors import ConfigError, DeviceError
from xinfer_transformers.loading import load
from xinfer_transformers.rows import Rows


class TransformersRunner(ModelRunner):
    """Runs a checkpoint as transformers does, a block being a whole sequence."""

    def __init__(self, context: BackendContext) -> None:
        spec, limits, config = context.model.spec, context.limits, context.config
        longest = spec.context_len(limits.max_model_len)
        if longest > spec.default_len:
            raise ConfigError(
                f"engine.max_model_len={longest}: beyond {spec.default_len} tokens transformers turns all positions "
                "of this model anew, which no cached key survives: leave it out, or take backend=eager"
            )
        self._device, self._rows = choose_device(config.device), Rows()
        dtype = choose_dtype(context.model.dtype, self._device)
        self._model = load(context.model, config.attention, dtype, self._device)
        self._positions = "position_ids" in inspect.signature(self._model.forward).parameters
        token_bytes = self._token_bytes()
        budget = cache_budget(limits, longest * token_bytes, self._device)
        tokens = min(int(budget // token_bytes), longest * limits.max_num_seqs)
        if tokens < 2:
            raise DeviceError(f"the KV cache can't hold two tokens of {token_bytes} bytes: raise engine.kv_memory")
        self.info = RunnerInfo(
            vocab_size=spec.vocab_size,
            max_model_len=longest,
            block_size=longest,
            num_blocks=2 * limits.max_num_seqs,  # the others keep prompts
            kv_tokens=tokens,
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            threads=torch.get_num_threads() if self._device.type == "cpu" else 0,
            resident_weight_bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()),
            kv_cache_bytes=tokens * token_bytes,
            step_read_bytes=spec.step_read_parameters * dtype.itemsize,
            kv_token_bytes=token_bytes,
            notes=(f"transformers {transformers.__version__}, attention {self._model.config._attn_implementation}",),
            capabilities=frozenset({"copy", "free"}),
        )

    @torch.inference_mode()
    def _token_bytes(self) -> int:
        """Return what one token leaves in the cache, by computing one."""
        cache = DynamicCache()
        self._model(torch.zeros(1, 1, dtype=torch.int64, device=self._device), cache=cache, use_cache=True)
        return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        logits = torch.empty(len(batch.sample_at), self.info.vocab_size, device=self._device)
        lengths = np.diff(batch.query_starts)
        owner = np.searchsorted(batch.query_starts, batch.sample_at, "right") - 1
        single = np.flatnonzero(lengths == 1)
        for group in [*([single] if len(single) else []), *([s] for s in np.flatnonzero(lengths > 1))]:
            wanted = np.flatnonzero(np.isin(owner, group))
            logits[self._on_device(wanted)] = self._compute(batch, np.array(group), owner[wanted], wanted).float()
        return logits

    def _compute(
        self, batch: Batch, group: NDArray[np.integer], owner: NDArray[np.integer], wanted: NDArray[np.integer]
    ) -> Tensor:
        """Compute some sequences' new tokens, as many of each; return logits at `sample_at[wanted]`, whose are told."""
        starts, contexts = batch.query_starts[group], batch.context_lens[group]
        count, longest = int(batch.query_starts[group[0] + 1] - starts[0]), int(contexts.max())
        blocks, tokens = batch.block_tables[group, 0].tolist(), starts[:, None] + np.arange(count)
        cache = self._rows.cache(blocks, (contexts - count).tolist())
        alone = len(group) == 1
        inputs: dict[str, Any] = {
            "input_ids": self._on_device(batch.token_ids[tokens]),
            "attention_mask": self._on_device(np.arange(longest) >= longest - contexts[:, None]),
            "logits_to_keep": self._on_device(batch.sample_at[wanted] - starts[0]) if alone else 0,
        }
        if self._positions:
            inputs["position_ids"] = self._on_device(batch.positions[tokens])
        logits: Tensor = self._model(**inputs, cache=cache, use_cache=True).logits
        self._rows.keep(blocks, contexts.tolist(), cache)
        return logits[0] if alone else logits[self._on_device(np.searchsorted(group, owner)), 0]

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        self._rows.copy(source, target, tokens)

    def free(self, blocks: Sequence[int]) -> None:
        """See `ModelRunner.free`."""
        self._rows.free(blocks)

    def close(self) -> None:
        """Give back the memory."""
        del self._model, self._rows
