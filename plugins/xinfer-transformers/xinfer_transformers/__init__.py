"""`backend=transformers`: a checkpoint as Hugging Face transformers runs it, by that library's own model."""

__all__ = ["TransformersConfig", "xinfer_backends"]

from dataclasses import dataclass

from xinfer import Backend, BackendContext, ModelRunner, hookimpl
from xinfer.errors import nearest

ATTENTION = ("auto", "eager", "sdpa")


@dataclass
class TransformersConfig:
    """Keys of `backend=transformers`.

    Attributes:
        device: `auto` takes the first CUDA device if there is one; or `cpu`, `cuda`, `cuda:N`.
        attention: `eager` is plain matrix products, `sdpa` torch's fused attention; `auto` lets transformers choose.
    """

    device: str = "auto"
    attention: str = "auto"


def create(context: BackendContext) -> ModelRunner:
    """Load the model."""
    from xinfer_transformers.runner import TransformersRunner

    return TransformersRunner(context)


def supports(spec: object, config: TransformersConfig) -> str | None:
    """Return which key has a value that can't be; which models transformers can load, only loading tells."""
    if config.attention in ATTENTION:
        return None
    near = nearest(str(config.attention), ATTENTION)
    return f"backend.attention={config.attention!r} is unknown{near} (there are: {', '.join(ATTENTION)})"


@hookimpl
def xinfer_backends() -> list[Backend]:
    """Return the backend."""
    return [Backend("transformers", TransformersConfig, create, "Hugging Face transformers", supports=supports)]
