"""`backend=compile`: the decoder of `backend=eager`, its steps compiled; on a CUDA device decode steps are recorded."""

__all__ = ["CompiledRunner"]

import logging
import os
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.utils import cpp_extension

from xinfer.backends import BackendContext
from xinfer.backends.torch.captured import CudaRecorder, Recorder, Recordings
from xinfer.backends.torch.decoder import AnyStep
from xinfer.backends.torch.graphs import Graphs
from xinfer.backends.torch.kernels import available, compiler
from xinfer.backends.torch.loading import held_bytes
from xinfer.backends.torch.paged import PagedStep, plan_paged
from xinfer.backends.torch.runner import TorchRunner
from xinfer.backends.torch.threads import end_threads
from xinfer.backends.torch.trial import largest_steps, peak_bytes
from xinfer.devices import choose_device, choose_dtype
from xinfer.engine.types import Batch, Limits
from xinfer.errors import DeviceError
from xinfer.models.spec import DecoderSpec
from xinfer.process_memory import use_huge_pages

log = logging.getLogger(__name__)


class CompiledRunner(TorchRunner):
    """Computes steps by graphs.

    Args:
        context: what is run, and how.
        record: records decode steps; None for what the device has, which is nothing on a CPU. Where attention gathers
            keys (`sdpa`), nothing is recorded on a device either: it would gather a whole context for every sequence;
            nor is what several processes meet in.
    """

    can_pad = tells_layers = False

    def __init__(self, context: BackendContext, record: Recorder | None = None) -> None:
        device = choose_device(context.config.device)
        _check(device, context.model.spec, choose_dtype(context.model.dtype, device))
        self._record, self._records = record, device.type == "cuda" and context.config.cuda_graphs
        self._recordings: Recordings | None = None
        self._huge_pages = device.type == "cpu" and context.config.huge_pages
        super().__init__(context)
        if self._record is not None:
            self._recordings = self._recorded(self._record, context.limits)
        end_threads()

    def prepare(self, limits: Limits, longest: int) -> int:
        """Load the graphs; on a CUDA device the largest steps are tried."""
        if self._huge_pages:
            use_huge_pages(held_bytes(self.model))
        alone, gathers = self.ranks is None, "sdpa" in self.kernels.values()
        if self._record is None and self._records and alone and not gathers:
            self._record = CudaRecorder(self.device)
        self.spare_blocks = 0 if self._record is None else 1
        started = perf_counter()
        self._graphs = Graphs(self.model, self.pools, self.block_size, self.kernels)
        log.info("graphs loaded", extra={"seconds": perf_counter() - started})
        if self.device.type == "cpu":
            return 0
        largest = largest_steps(limits, longest, self.block_size)
        return sum(peak_bytes(self.device, partial(self.forward, step)) for step in largest)

    def _recorded(self, record: Recorder, limits: Limits) -> Recordings:
        with torch.inference_mode():
            for pool in self.pools:
                pool[-self.block_size :].zero_()
            return Recordings(
                lambda ids, positions, step: self._graphs(ids, positions, step, self.pools),
                limits.max_num_seqs,
                self.info.max_model_len,
                self.info.num_blocks,
                self.block_size,
                self.kernels,
                self.device,
                record,
            )

    def plan(self, batch: Batch) -> AnyStep:
        """See `TorchRunner.plan`."""
        return plan_paged(batch, self.block_size, self.device, self.kernels)

    def compute(self, token_ids: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        """See `TorchRunner.compute`."""
        assert isinstance(step, PagedStep)
        logits = None if self._recordings is None else self._recordings(token_ids, positions, step)
        return self._graphs(token_ids, positions, step, self.pools) if logits is None else logits

    def close(self) -> None:
        """Give back the memory."""
        del self._graphs, self._recordings, self._record
        super().close()


def _check(device: torch.device, spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Refuse what graphs can't be made for or with, before anything is read."""
    if device.type == "cpu":
        if not available():
            raise DeviceError(
                "backend=compile needs Linux and a C++ compiler (g++ or clang++): install one, or take backend=eager"
            )
        return
    if compiler() is None or cpp_extension.CUDA_HOME is None:
        missing = "a C++ compiler (g++ or clang++)" if compiler() is None else "the CUDA toolkit (nvcc, or CUDA_HOME)"
        raise DeviceError(
            f"backend=compile on {device} needs {missing}: install it, or take backend=eager or backend.device=cpu"
        )
    os.environ.setdefault("CUDA_HOME", cpp_extension.CUDA_HOME)  # where torch looks for the driver's stub
    if dtype != torch.bfloat16 and any(layer.mlp.experts for layer in spec.layers):
        raise DeviceError(
            f"backend=compile on {device} computes experts in bfloat16 only, and model.dtype is "
            f"{str(dtype).removeprefix('torch.')}: take model.dtype=bfloat16, or backend=eager"
        )
