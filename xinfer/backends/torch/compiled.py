"""`backend=compile`: the decoder of `backend=eager`, its steps compiled."""

__all__ = ["CompiledRunner"]

import logging
from time import perf_counter

from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.torch.attention import CpuStep
from xinfer.backends.torch.decoder import AnyStep
from xinfer.backends.torch.graphs import Graphs
from xinfer.backends.torch.kernels import available
from xinfer.backends.torch.runner import BLOCK, TorchRunner
from xinfer.backends.torch.threads import end_threads
from xinfer.devices import choose_device
from xinfer.errors import DeviceError
from xinfer.process_memory import use_huge_pages

log = logging.getLogger(__name__)


class CompiledRunner(TorchRunner):
    """Computes steps by graphs."""

    can_pad = tells_layers = False

    def __init__(self, context: BackendContext) -> None:
        device = choose_device(context.config.device)
        if device.type != "cpu":
            raise DeviceError(
                f"backend=compile computes on the CPU only, not on {device}: take backend=eager, or backend.device=cpu"
            )
        if not available():
            raise DeviceError(
                "backend=compile needs Linux and a C++ compiler (g++ or clang++): install one, or take backend=eager"
            )
        super().__init__(context)
        started = perf_counter()
        self._graphs = Graphs(self.model, self.pools, BLOCK)
        end_threads()
        log.info("graphs loaded", extra={"seconds": perf_counter() - started})

    def weights_loaded(self, context: BackendContext, resident: int) -> None:
        """See `TorchRunner.weights_loaded`."""
        if context.config.huge_pages:
            use_huge_pages(resident)

    def compute(self, token_ids: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        """See `TorchRunner.compute`."""
        assert isinstance(step, CpuStep)
        return self._graphs(token_ids, positions, step)

    def close(self) -> None:
        """Give back the memory."""
        del self._graphs
        super().close()
