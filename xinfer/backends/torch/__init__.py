"""`backend=eager`: one plain decoder in torch, on the CPU or a CUDA device."""

__all__ = ["EagerConfig", "xinfer_backends"]

from dataclasses import dataclass

from xinfer.backends import Backend, BackendContext
from xinfer.engine.runner import ModelRunner
from xinfer.hookspecs import hookimpl


@dataclass
class EagerConfig:
    """Keys of `backend=eager`.

    Attributes:
        device: `auto` takes the first CUDA device if there is one; or `cpu`, `cuda`, `cuda:1`, ...
        threads: of the CPU; None takes one for each physical core.
    """

    device: str = "auto"
    threads: int | None = None


def create(context: BackendContext) -> ModelRunner:
    """Load the model onto the device."""
    from xinfer.backends.torch.runner import TorchRunner

    return TorchRunner(context)


@hookimpl
def xinfer_backends() -> list[Backend]:
    """Return the backends of this folder."""
    return [Backend("eager", EagerConfig, create, "plain PyTorch, on the CPU or CUDA")]
