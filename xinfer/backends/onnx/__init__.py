"""`backend=onnx`: a graph written from the model's spec, on ONNX Runtime."""

__all__ = ["OnnxConfig", "xinfer_backends"]

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xinfer.backends import Backend, BackendContext
from xinfer.engine.runner import ModelRunner
from xinfer.errors import ConfigError, nearest
from xinfer.hookspecs import hookimpl
from xinfer.models.layers import AttentionSpec
from xinfer.models.spec import DecoderSpec


@dataclass
class OnnxConfig:
    """Keys of `backend=onnx`.

    Attributes:
        device: `auto` takes the first CUDA device if there is one and its provider loads; or `cpu`, `cuda`, ...
        threads: of the CPU; None takes one for each physical core.
        accuracy_level: of products with quantized matrices: 4 rounds what they multiply to int8, 1 computes in float32.
        kv_dtype: of keys and values in the cache: None is that of activations, float32; `int8` takes a quarter of the
            memory (on the CPU).
        huge_pages: move weights into huge pages once they are loaded (Linux): what that takes, 200 to 450 tokens save.
        providers: execution providers instead of those that `device` means, most wanted first, each a name or
            {name: {option: value}} in ONNX Runtime's words; the CPU takes what others leave.
    """

    device: str = "auto"
    threads: int | None = None
    accuracy_level: int = 4
    kv_dtype: str | None = None
    huge_pages: bool = True
    providers: list[Any] = field(default_factory=list)


def create(context: BackendContext) -> ModelRunner:
    """Load the model into a session."""
    from xinfer.backends.onnx.providers import choose

    choice = choose(context.config, context.model.dtype)
    if reason := _cache_refusal(context.config, choice.device.type):
        raise ConfigError(reason)
    if choice.device.type == "cuda":
        from xinfer.backends.onnx.cuda import CudaRunner

        return CudaRunner(context, choice)
    from xinfer.backends.onnx.runner import OnnxRunner

    return OnnxRunner(context, choice.providers)


def export_folder(context: BackendContext, folder: Path, all_logits: bool) -> None:
    """Write the model for other programs."""
    if context.config.kv_dtype is not None:
        raise ConfigError(f"backend.kv_dtype={context.config.kv_dtype}: an export's cache is that of its activations")
    from xinfer.backends.onnx.export import export_model

    export_model(context, folder, all_logits)


def supports(spec: DecoderSpec, config: OnnxConfig) -> str | None:
    """Return which field of a spec, or which key, the graph has no nodes for: on the CPU it has them for all specs."""
    device = str(config.device).partition(":")[0]
    if reason := _cache_refusal(config, device):
        return reason
    if device == "cuda":
        from xinfer.backends.onnx.paged import refusal

        return refusal(spec)
    return None


def _cache_refusal(config: OnnxConfig, device: str) -> str | None:
    """Return why keys and values can't be kept as the configuration wants them."""
    if config.kv_dtype not in (None, "int8"):
        return f"backend.kv_dtype={config.kv_dtype} is none of null and int8{nearest(str(config.kv_dtype), ['int8'])}"
    if config.kv_dtype is not None and device == "cuda":
        return f"backend.kv_dtype={config.kv_dtype} is for the CPU; on CUDA the cache is that of activations (null)"
    return None


def cache_bytes(spec: AttentionSpec, config: OnnxConfig, element: int) -> int:
    """Return the bytes that a token leaves in a layer's cache; its scales are the whole cache's."""
    return spec.cache_width * (1 if config.kv_dtype == "int8" else element)


@hookimpl
def xinfer_backends() -> list[Backend]:
    """Return the backends of this folder."""
    return [
        Backend(
            "onnx",
            OnnxConfig,
            create,
            "ONNX Runtime, on the CPU or CUDA",
            supports=supports,
            export=export_folder,
            cache_bytes=cache_bytes,
            quantizes=True,
        )
    ]
