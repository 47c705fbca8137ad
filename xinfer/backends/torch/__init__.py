"""`backend=eager`: one plain decoder in torch, on the CPU or a CUDA device."""

__all__ = ["EagerConfig", "backends"]

from dataclasses import dataclass

from xinfer.backends import Backend, BackendContext
from xinfer.engine.runner import ModelRunner


@dataclass
class EagerConfig:
    """Keys of `backend=eager`."""

    name: str = "eager"
    device: str = "auto"
    threads: int | None = None


def create(context: BackendContext) -> ModelRunner:
    """Load the model onto the device."""
    from xinfer.backends.torch.runner import TorchRunner

    return TorchRunner(context)


def backends() -> list[Backend]:
    """Return the backends of this folder."""
    return [Backend("eager", EagerConfig, create, "plain PyTorch, on the CPU or CUDA")]
