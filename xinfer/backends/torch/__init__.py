"""`backend=eager`: one plain decoder in torch, on the CPU or a CUDA device; `backend=compile`: the same, compiled."""

__all__ = ["CompileConfig", "EagerConfig", "xinfer_backends"]

from dataclasses import dataclass

from xinfer.backends import Backend, BackendContext
from xinfer.engine.runner import ModelRunner
from xinfer.errors import nearest
from xinfer.hookspecs import hookimpl
from xinfer.models.layers import AttentionSpec
from xinfer.models.rope import KINDS
from xinfer.models.spec import DecoderSpec


@dataclass
class EagerConfig:
    """Keys of `backend=eager`.

    Attributes:
        device: `auto` takes the first CUDA device if there is one; or `cpu`, `cuda`, `cuda:1`, ...
        threads: of the CPU; None takes one for each physical core.
        kv_dtype: of keys and values in the cache: None is that of activations; `int8` and `fp8` take about a quarter of
            float32's memory, each head of each token with a scale of its own.
        pinned_memory: of the host, in which layers that are streamed to a CUDA device may stay, instead of being read
            again for each step: bytes, or up to 1 a share of what is free. No other program can use such memory.
    """

    device: str = "auto"
    threads: int | None = None
    kv_dtype: str | None = None
    pinned_memory: float = 0.0


@dataclass
class CompileConfig:
    """Keys of `backend=compile`.

    Attributes:
        device, threads, kv_dtype: see `EagerConfig`.
        cuda_graphs: record decode steps on a CUDA device, for up to `engine.max_num_seqs` sequences, when the model is
            loaded; without, each step is started kernel by kernel.
        huge_pages: move weights into huge pages once they are loaded (Linux, on a CPU).
    """

    device: str = "auto"
    threads: int | None = None
    kv_dtype: str | None = None
    huge_pages: bool = True
    cuda_graphs: bool = True


def create(context: BackendContext) -> ModelRunner:
    """Load the model onto the device."""
    from xinfer.backends.torch.parallel import led
    from xinfer.backends.torch.runner import TorchRunner

    runner = TorchRunner(context)
    return led(runner, runner.ranks)


def create_compiled(context: BackendContext) -> ModelRunner:
    """Load the model and the graphs of its steps."""
    from xinfer.backends.torch.compiled import CompiledRunner
    from xinfer.backends.torch.parallel import led

    runner = CompiledRunner(context)
    return led(runner, runner.ranks)


def supports(spec: DecoderSpec, config: EagerConfig | CompileConfig) -> str | None:
    """Return which key rules a spec out, or which field has a value that only another family's plugin can mean."""
    from xinfer.backends.torch.linear import ACTIVATIONS

    if reason := _cache_refusal(spec, config.kv_dtype):
        return reason
    for index, layer in enumerate(spec.layers):
        mlp, rope = layer.mlp, layer.attention.rope
        if mlp.activation not in ACTIVATIONS and not (mlp.gated and mlp.activation == "swiglu"):
            return f"layers[{index}].mlp.activation={mlp.activation!r} is unknown to it"
        if rope is not None and rope.kind not in KINDS:
            return f"layers[{index}].attention.rope.kind={rope.kind!r} is unknown to it"
    return None


def _cache_refusal(spec: DecoderSpec, kv_dtype: str | None) -> str | None:
    """Return why keys and values can't be kept so."""
    known = ("int8", "fp8")
    if kv_dtype is None:
        return None
    if kv_dtype not in known:
        return f"backend.kv_dtype={kv_dtype} is none of null, int8 and fp8{nearest(str(kv_dtype), known)}"
    for index, layer in enumerate(spec.layers):
        if layer.attention.latent is not None:
            return (
                f"layers[{index}].attention.latent is set: a vector that is all heads' keys and values, with positions "
                f"in a part of it, has no scales by head, which backend.kv_dtype={kv_dtype} needs: leave it out (null)"
            )
    return None


def cache_bytes(spec: AttentionSpec, config: EagerConfig | CompileConfig, element: int) -> int:
    """Return the bytes that a token leaves in a layer's cache."""
    from xinfer.backends.torch.entries import KV_DTYPES, entry_bytes

    kept = KV_DTYPES.get(config.kv_dtype or "")
    return spec.cache_width * element if kept is None else entry_bytes(spec, kept)


def notes(context: BackendContext) -> tuple[str, ...]:
    """Return which kernels would compute a model's attention, and why no better ones."""
    from xinfer.backends.torch.choosing import choose_kernels, note_of
    from xinfer.backends.torch.entries import KV_DTYPES
    from xinfer.devices import choose_device, choose_dtype

    spec, device = context.model.spec, choose_device(context.config.device, context.processes)
    dtype = choose_dtype(context.model.dtype, device)
    kept = KV_DTYPES.get(context.config.kv_dtype or "", dtype)
    note = note_of(spec, choose_kernels(spec, dtype, kept, device))
    return (f"{note} on {device} in {str(dtype).removeprefix('torch.')}",)


@hookimpl
def xinfer_backends() -> list[Backend]:
    """Return the backends of this folder."""
    return [
        Backend(
            "eager",
            EagerConfig,
            create,
            "plain PyTorch, on the CPU or CUDA",
            supports=supports,
            cache_bytes=cache_bytes,
            notes=notes,
            quantizes=True,
            streams=True,
            splits=True,
        ),
        Backend(
            "compile",
            CompileConfig,
            create_compiled,
            "PyTorch, compiled ahead of time, for the CPU or CUDA",
            supports=supports,
            cache_bytes=cache_bytes,
            notes=notes,
            quantizes=True,
            splits=True,
        ),
    ]
