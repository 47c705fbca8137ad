"""The torch decoder as a `ModelRunner`: device and precision chosen, weights placed, the cache allocated."""

__all__ = ["TorchRunner"]

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
from xinfer.backends.torch.choosing import block_size_of, choose_kernels, note_of
from xinfer.backends.torch.decoder import AnyStep
from xinfer.backends.torch.entries import KV_DTYPES, entry_bytes
from xinfer.backends.torch.flex import MOST_NUMBERS, warm_up
from xinfer.backends.torch.invariant import (
    Padding,
    Part,
    attention_is_invariant,
    find_padding,
    plan_invariant,
    repeat_last,
)
from xinfer.backends.torch.loading import load
from xinfer.backends.torch.paged import begun_blocks, plan_step
from xinfer.backends.torch.parallel import Ranks
from xinfer.backends.torch.threads import end_threads
from xinfer.devices import cache_budget, choose_device, choose_dtype
from xinfer.engine.runner import LEVELS, ModelRunner, RunnerInfo
from xinfer.engine.transfer import send
from xinfer.engine.types import Batch, Limits
from xinfer.errors import DeviceError
from xinfer.hardware import available_memory, gibibytes
from xinfer.process_memory import ResidentMemory
from xinfer.processes import count

log = logging.getLogger(__name__)

_FEW = 2  # blocks of a cache at least, which graphs count on


class TorchRunner(ModelRunner):
    """Runs a `Decoder` step by step.

    Attributes:
        can_pad: whether it can compute rows alike in any number of rows, if asked to (`determinism=invariant`).
        tells_layers: whether what a layer brings can be seen.
        spare_blocks: of the cache, beyond those that the engine hears of.
    """

    can_pad = True
    tells_layers = True
    spare_blocks = 0

    def __init__(self, context: BackendContext) -> None:
        spec, limits, wanted = context.model.spec, context.limits, context.config.kv_dtype
        self._memory = ResidentMemory()
        self.device = choose_device(context.config.device, context.processes)
        self.dtype = choose_dtype(context.model.dtype, self.device)
        _set_threads(context.config.threads, context.processes)
        self.ranks = Ranks(self.device) if context.processes > 1 else None
        longest = spec.context_len(limits.max_model_len)
        invariant = limits.invariant and self.can_pad and self.ranks is None
        pinned = getattr(context.config, "pinned_memory", 0.0)  # a key of those that stream
        loaded = load(context.model, self.ranks, longest, self.dtype, self.device, invariant, pinned)
        self.model = loaded.decoder
        self.padding = self._find_padding(limits) if invariant else None
        kept = self.dtype if wanted is None else KV_DTYPES[wanted]
        chosen = self._choose_kernels(kept)
        widths = [entry_bytes(layer.attention, kept) for layer in self.model.spec.layers]
        blocks = self._place_cache(limits, longest, widths, kept)
        if self._reads_whole_blocks:
            self._compile_kernels()
        cache = None if wanted is None else f"the KV cache is {wanted}"
        self.info = RunnerInfo(
            vocab_size=spec.vocab_size,
            max_model_len=longest,
            block_size=self.block_size,
            num_blocks=blocks,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            threads=torch.get_num_threads() if self.device.type == "cpu" else 0,
            resident_weight_bytes=loaded.resident_bytes,
            kv_cache_bytes=sum(p.numel() * p.element_size() for p in self.pools),
            step_read_bytes=loaded.step_read_bytes,
            kv_token_bytes=sum(widths),
            stream_slots=loaded.stream.slots,
            stream_bytes=loaded.stream.bytes,
            notes=tuple(str(each) for each in (self.padding, self.ranks, cache, chosen) if each is not None),
            levels=frozenset({"rerun"}) if self.padding is None else LEVELS,
            capabilities=self._capabilities(),
        )
        end_threads()  # who steps may be another thread

    def _choose_kernels(self, kept: torch.dtype) -> str | None:
        """Choose how attention is computed; return what is to be said of it, if it is not the usual."""
        choices = choose_kernels(self.model.spec, self.dtype, kept, self.device)
        self.kernels = {kind: choice.kernel for kind, choice in choices.items()}
        self.block_size = block_size_of(choices.values())
        self._reads_whole_blocks = "flex" in self.kernels.values()
        paged = [choices[layer.attention].paged for layer in self.model.spec.layers]
        self._paged_ratio = sum(paged) / len(paged) if self.padding is None else 0.0
        usual = self.padding is not None or set(self.kernels.values()) == {"cpp"}
        return None if usual else note_of(self.model.spec, choices)

    def _place_cache(self, limits: Limits, longest: int, widths: list[int], kept: torch.dtype) -> int:
        """Give the cache what memory steps leave; a token has so many bytes of each layer's. Return its blocks."""
        self.pools = self._make_pools(_FEW, widths, kept)  # to try steps with
        taken = self.prepare(limits, longest)
        blocks = cache_blocks(sum(widths), self.block_size, limits, longest, self.device, taken)
        if self._reads_whole_blocks:
            blocks = min(blocks, MOST_NUMBERS * kept.itemsize // (max(widths) * self.block_size) - self.spare_blocks)
        if self.ranks is not None:
            blocks = self.ranks.least(blocks)
        self.pools = self._make_pools(max(_FEW, blocks + self.spare_blocks), widths, kept)
        return blocks

    def _capabilities(self) -> frozenset[str]:
        layers = {"layers"} if self.tells_layers and self.ranks is None else set()
        ahead = {"ahead"} if self.device.type == "cuda" and self.ranks is None else set()
        return frozenset({"copy"} | layers | ahead)

    def _make_pools(self, blocks: int, widths: list[int], kept: torch.dtype) -> list[Tensor]:
        """Return each layer's cache; a token has so many bytes of each."""
        with torch.inference_mode():
            shapes = [(blocks * self.block_size, width // kept.itemsize) for width in widths]
            return [torch.empty(shape, dtype=kept, device=self.device) for shape in shapes]

    def prepare(self, limits: Limits, longest: int) -> int:
        """Do what has to be done before the cache takes what memory there is; return the bytes that steps take besides.

        There are caches of two blocks.
        """
        return 0

    @torch.inference_mode()
    def _compile_kernels(self) -> None:
        """Have what is compiled when it is first called be compiled before anybody waits for it."""
        log.warning("attention is compiled for this model; this takes up to a minute")
        started, layers = perf_counter(), zip(self.model.spec.layers, self.pools, strict=True)
        for kind, pool in {layer.attention: pool for layer, pool in layers}.items():
            if self.kernels[kind] == "flex":
                warm_up(kind, pool, self.dtype, self.block_size)
        log.info("attention compiled", extra={"seconds": perf_counter() - started})

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
            if self._reads_whole_blocks:
                self._clear(begun_blocks(batch, self.block_size))
            if self.padding is None:
                step = self.plan(batch)
            else:
                token_ids, positions = (repeat_last(values, self.padding) for values in (token_ids, positions))
                step = plan_invariant(batch, self.block_size, self.padding, self.device)
            ids = send(token_ids, self.device, torch.int64)
            if batch.drawn is not None:  # what ended with an error has none, and nobody wants what comes of it
                ids = ids.where(ids >= 0, batch.drawn[(-1 - ids).clamp(min=0)].clamp(min=0))
            logits = self.compute(ids, send(positions, self.device), step)[: len(batch.sample_at)]
        if self.ranks is not None:
            self.ranks.check()
        return logits

    def _clear(self, blocks: NDArray[np.int64]) -> None:
        """Forget what blocks held: a kernel that reads them whole would have it infect others, if it is no number."""
        if len(blocks):
            places = send(blocks, self.device)
            for pool in self.pools:
                pool.view(-1, self.block_size, pool.shape[1]).index_fill_(0, places, 0)

    def plan(self, batch: Batch) -> AnyStep:
        """Return what the layers need of a batch."""
        return plan_step(batch, self.block_size, self.device, self.kernels)

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
                blocks = pool.view(-1, self.block_size, pool.shape[1])
                blocks[target, :tokens] = blocks[source, :tokens]
                if self._reads_whole_blocks:
                    blocks[target, tokens:] = 0

    def metrics(self) -> Mapping[str, Any]:
        """See `ModelRunner.metrics`."""
        used = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self._memory()
        metrics: dict[str, Any] = {"mem_used": used, "paged_attention_ratio": self._paged_ratio}
        if (stream := self.model.stream) is not None:
            metrics["stream_wait_ms"] = stream.waited() * 1e3
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


def cache_blocks(
    token_bytes: int, block_size: int, limits: Limits, longest: int, device: torch.device, taken: int = 0
) -> int:
    """Return how many blocks the cache gets: no more than all sequences could fill, and what memory allows.

    Of the memory that is free, steps take so much that is not the cache's.
    """
    block_bytes = token_bytes * block_size
    whole = -(-longest // block_size)
    budget = cache_budget(limits, whole * block_bytes, device)
    if taken:
        budget = min(budget, available_memory(device) - taken)
    blocks = min(int(budget // block_bytes), whole * limits.max_num_seqs)
    if blocks < 1 + (longest > block_size):
        raise DeviceError(
            f"the KV cache gets {gibibytes(budget)}, too little for even {2 * block_size} tokens "
            f"({gibibytes(block_bytes)} for {block_size}): raise engine.kv_memory, lower engine.max_model_len or "
            "engine.max_num_seqs, or take a smaller precision (model.dtype=bfloat16, backend.kv_dtype=int8)"
        )
    return blocks
