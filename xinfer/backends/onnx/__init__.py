"""`backend=onnx`: a graph written from the model's spec, on ONNX Runtime."""

__all__ = ["OnnxConfig", "xinfer_backends"]

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xinfer.backends import Backend, BackendContext
from xinfer.engine.runner import ModelRunner
from xinfer.hookspecs import hookimpl
from xinfer.models.spec import DecoderSpec


@dataclass
class OnnxConfig:
    """Keys of `backend=onnx`.

    Attributes:
        device: `auto` takes the first CUDA device if there is one and its provider loads; or `cpu`, `cuda`, ...
        threads: of the CPU; None takes one for each physical core.
        accuracy_level: of products with quantized matrices: 4 rounds what they multiply to int8, 1 computes in float32.
        huge_pages: move weights into huge pages once they are loaded (Linux): what that takes, about 450 tokens save.
        providers: execution providers instead of those that `device` means, most wanted first, each a name or
            {name: {option: value}} in ONNX Runtime's words; the CPU takes what others leave.
    """

    device: str = "auto"
    threads: int | None = None
    accuracy_level: int = 4
    huge_pages: bool = False
    providers: list[Any] = field(default_factory=list)


def create(context: BackendContext) -> ModelRunner:
    """Load the model into a session."""
    from xinfer.backends.onnx.providers import choose

    choice = choose(context.config, context.model.dtype)
    if choice.device.type == "cuda":
        from xinfer.backends.onnx.cuda import CudaRunner

        return CudaRunner(context, choice)
    from xinfer.backends.onnx.runner import OnnxRunner

    return OnnxRunner(context, choice.providers)


def export_folder(context: BackendContext, folder: Path, all_logits: bool) -> None:
    """Write the model for other programs."""
    from xinfer.backends.onnx.export import export_model

    export_model(context, folder, all_logits)


def supports(spec: DecoderSpec, config: OnnxConfig) -> str | None:
    """Return which field of a spec the graph has no nodes for: it has them for all."""
    if str(config.device).startswith("cuda"):
        from xinfer.backends.onnx.paged import refusal

        return refusal(spec)
    return None


@hookimpl
def xinfer_backends() -> list[Backend]:
    """Return the backends of this folder."""
    about = "ONNX Runtime, on the CPU or CUDA"
    return [Backend("onnx", OnnxConfig, create, about, supports=supports, export=export_folder, quantizes=True)]
