"""`backend=llamacpp`: GGUF files as llama.cpp runs them, on the CPU."""

__all__ = ["LlamaCppConfig", "xinfer_backends"]

from dataclasses import dataclass

from xinfer import Backend, BackendContext, ModelRunner, hookimpl
from xinfer.errors import ConfigError, ModelError, nearest
from xinfer.models.model import Model

KV_DTYPES = ("float16", "float32")
FLASH_ATTENTION = ("auto", "on", "off")


@dataclass
class LlamaCppConfig:
    """Keys of `backend=llamacpp`.

    Attributes:
        threads: None takes one for each physical core.
        ubatch: tokens that llama.cpp computes at once; a step with more is cut.
        kv_dtype: of keys and values in the cache: `float16`, as llama.cpp itself, or `float32`, which loses nothing.
        kv_unified: one pool of cells for all sequences; else each has cells for its longest context, which is faster
            with many sequences and takes all that memory from the start.
        flash_attention: `auto` lets llama.cpp choose, `on`, `off`.
    """

    threads: int | None = None
    ubatch: int = 512
    kv_dtype: str = "float16"
    kv_unified: bool = True
    flash_attention: str = "auto"


def create(context: BackendContext) -> ModelRunner:
    """Load the model; what llama.cpp can't have in the form that is asked for is refused."""
    _check(context.model)
    from xinfer_llamacpp.runner import LlamaCppRunner

    return LlamaCppRunner(context)


def supports(spec: object, config: LlamaCppConfig) -> str | None:
    """Return which key has a value that can't be; which files llama.cpp can load, only loading tells."""
    for name, choices in (("kv_dtype", KV_DTYPES), ("flash_attention", FLASH_ATTENTION)):
        if (value := getattr(config, name)) not in choices:
            return (
                f"backend.{name}={value!r} is unknown{nearest(str(value), choices)} (there are: {', '.join(choices)})"
            )
    for name in ("threads", "ubatch"):
        if (value := getattr(config, name)) is not None and value < 1:
            return f"backend.{name}={value} is out of range: at least 1 is expected"
    return None


def _check(model: Model) -> None:
    if model.path.suffix != ".gguf":
        raise ModelError(
            f"{model.path}: backend=llamacpp runs GGUF files: convert the folder with llama.cpp's "
            "convert_hf_to_gguf.py, or take backend=eager or backend=transformers"
        )
    if model.load_format == "dummy":
        raise ConfigError("model.load_format=dummy: backend=llamacpp has the file's weights only: take backend=eager")
    if model.adapter is not None:
        raise ConfigError("model.lora: backend=llamacpp merges no adapters: take backend=eager or backend=onnx")
    if model.dtype not in ("auto", "float32", "fp32"):
        raise ConfigError(f"model.dtype={model.dtype}: backend=llamacpp computes in the file's own types: leave it out")


@hookimpl
def xinfer_backends() -> list[Backend]:
    """Return the backend."""
    return [Backend("llamacpp", LlamaCppConfig, create, "llama.cpp, GGUF files on the CPU", supports=supports)]
