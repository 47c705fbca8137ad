"""The torch decoder as a `ModelRunner`: device and precision chosen, weights placed, the cache allocated."""

__all__ = ["BLOCK", "TorchRunner"]

import logging
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.torch.attention import plan_step
from xinfer.backends.torch.decoder import AnyStep
from xinfer.backends.torch.entries import KV_DTYPES, entry_bytes
from xinfer.backends.torch.invariant import (
    Padding,
    Part,
    attention_is_invariant,
    find_padding,
    plan_invariant,
    repeat_last,
)
from xinfer.backends.torch.loading import load
from xinfer.backends.torch.parallel import Ranks
from xinfer.backends.torch.threads import end_threads
from xinfer.devices import cache_budget, choose_device, choose_dtype
from xinfer.engine.runner import LEVELS, ModelRunner, RunnerInfo
from xinfer.engine.types import Batch, Limits
from xinfer.errors import DeviceError
from xinfer.hardware import gibibytes
from xinfer.process_memory import ResidentMemory
from xinfer.processes import count

log = logging.getLogger(__name__)

BLOCK = 16  # tokens in a block of the cache


class TorchRunner(ModelRunner):
    """Runs a `Decoder` step by step.

    Attributes:
        can_pad: whether it can compute rows alike in any number of rows, if asked to (`determinism=invariant`).
        tells_layers: whether what a layer brings can be seen.
    """

    can_pad = True
    tells_layers = True

    def __init__(self, context: BackendContext) -> None:
        spec, self._memory = context.model.spec, ResidentMemory()
        self.device = choose_device(context.config.device, context.processes)
        self.dtype = choose_dtype(context.model.dtype, self.device)
        _set_threads(context.config.threads, context.processes)
        self.ranks = Ranks(self.device) if context.processes > 1 else None
        longest, wanted = spec.context_len(context.limits.max_model_len), context.config.kv_dtype
        kept = self.dtype if wanted is None else KV_DTYPES[wanted]
        invariant = context.limits.invariant and self.can_pad and self.ranks is None
        loaded = load(context.model, self.ranks, longest, self.dtype, self.device, invariant)
        self.model, stream = loaded.decoder, loaded.stream
        self.padding = self._find_padding(context.limits) if invariant else None
        widths = [entry_bytes(layer.attention, kept) for layer in self.model.spec.layers]
        blocks = cache_blocks(sum(widths), context.limits, longest, self.device)
        if self.ranks is not None:
            blocks = self.ranks.least(blocks)
        with torch.inference_mode():
            self.pools = [
                torch.empty(blocks * BLOCK, width // kept.itemsize, dtype=kept, device=self.device) for width in widths
            ]
        cache = None if wanted is None else f"the KV cache is {wanted}"
        self.info = RunnerInfo(
            vocab_size=spec.vocab_size,
            max_model_len=longest,
            block_size=BLOCK,
            num_blocks=blocks,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            threads=torch.get_num_threads() if self.device.type == "cpu" else 0,
            resident_weight_bytes=loaded.resident_bytes,
            kv_cache_bytes=sum(p.numel() * p.element_size() for p in self.pools),
            step_read_bytes=loaded.step_read_bytes,
            kv_token_bytes=sum(widths),
            stream_slots=stream.slots,
            stream_bytes=stream.bytes,
            notes=tuple(str(each) for each in (self.padding, self.ranks, cache) if each is not None),
            levels=frozenset({"rerun"}) if self.padding is None else LEVELS,
            capabilities=frozenset({"copy", "layers"} if self.tells_layers and self.ranks is None else {"copy"}),
        )
        end_threads()  # who steps may be another thread

    def _find_padding(self, limits: Limits) -> Padding | None:
        """Return with how many rows the model's matrices treat every row alike, or None where nothing makes them."""
        started, padding = perf_counter(), None
        parts = [(part, limits.max_num_batched_tokens) for part in self.model.parts()]
        parts.append((Part("head", self.model.spec.hidden_size, self.model.head), limits.logits_rows))
        attentions = {layer.attention for layer in self.model.spec.layers}
        with torch.inference_mode():
            if all(attention_is_invariant(a, self.dtype, self.device) for a in attentions):
                padding = find_padding(parts, self.dtype, self.device)
                self.model.pad(padding or Padding())
        log.info("rows probed", extra={"seconds": perf_counter() - started, "padding": str(padding)})
        return padding

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        with torch.inference_mode():
            token_ids: NDArray[np.integer] = batch.token_ids
            positions: NDArray[np.integer] = batch.positions
            if self.padding is None:
                step: AnyStep = plan_step(batch, BLOCK, self.device)
            else:
                token_ids, positions = (repeat_last(values, self.padding) for values in (token_ids, positions))
                step = plan_invariant(batch, BLOCK, self.padding, self.device)
            ids = torch.from_numpy(token_ids).to(self.device, torch.int64)
            logits = self.compute(ids, torch.from_numpy(positions).to(self.device), step)[: len(batch.sample_at)]
        if self.ranks is not None:
            self.ranks.check()
        return logits

    def compute(self, token_ids: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        """Return logits of at least the tokens `step.sample_at`; ids and positions are [T], on the device."""
        logits: Tensor = self.model(token_ids, positions, self.pools, step)
        return logits

    def layers(self, batch: Batch) -> list[Tensor]:
        """See `ModelRunner.layers`."""
        told: list[Tensor] = []

        def tell(module: object, inputs: tuple[Any, ...], output: Tensor) -> None:
            if not told:
                told.append(inputs[0].float().cpu())
            told.append(output.float().cpu())

        hooks = [layer.register_forward_hook(tell) for layer in self.model.layers]
        try:
            self.forward(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [each[: len(batch.token_ids)] for each in told]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        with torch.inference_mode():
            for pool in self.pools:
                blocks = pool.view(-1, BLOCK, pool.shape[1])
                blocks[target, :tokens] = blocks[source, :tokens]

    def metrics(self) -> Mapping[str, Any]:
        """See `ModelRunner.metrics`."""
        used = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self._memory()
        metrics: dict[str, Any] = {"mem_used": used}
        if (stream := self.model.stream) is not None:
            metrics["stream_wait_ms"], stream.waited_s = stream.waited_s * 1e3, 0.0
        return metrics

    def close(self) -> None:
        """Give back the memory."""
        if self.model.stream is not None:
            self.model.stream.close()
        del self.model, self.pools
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _set_threads(wanted: int | None, processes: int) -> None:
    """Compute on as many threads as are wanted; unasked, processes share the machine's cores, else torch knows best."""
    if wanted is None and processes > 1:
        wanted = max(1, (psutil.cpu_count(logical=False) or 1) // count(here=True))
    if wanted is not None:
        torch.set_num_threads(wanted)


def cache_blocks(token_bytes: int, limits: Limits, longest: int, device: torch.device) -> int:
    """Return how many blocks the cache gets: no more than all sequences could fill, and what memory allows."""
    block_bytes = token_bytes * BLOCK
    whole = -(-longest // BLOCK)
    budget = cache_budget(limits, whole * block_bytes, device)
    blocks = min(int(budget // block_bytes), whole * limits.max_num_seqs)
    if blocks < 1 + (longest > BLOCK):
        raise DeviceError(
            f"the KV cache gets {gibibytes(budget)}, too little for even {2 * BLOCK} tokens "
            f"({gibibytes(block_bytes)} for {BLOCK}): raise engine.kv_memory, lower engine.max_model_len or "
            "engine.max_num_seqs, or take a smaller precision (model.dtype=bfloat16, backend.kv_dtype=int8)"
        )
    return blocks
