"""What is refused before any work, beside what types and ranges say."""

__all__ = ["check_engine", "check_model"]

from xinfer.backends import Backend
from xinfer.config import Config
from xinfer.engine.logprobs import MODES
from xinfer.errors import ConfigError
from xinfer.models.model import Model
from xinfer.processes import count


def check_model(config: Config, model: Model, backend: Backend) -> None:
    """Refuse a model that a backend can't run, or not in the form that is asked for; only headers are read."""
    if reason := backend.refusal(model.spec, config.backend):
        raise ConfigError(
            f"backend={backend.name} can't run {config.model.reference}: {reason} "
            "(`python -m xinfer inspect` tells which backends can)"
        )
    if model.quantization is not None and not backend.quantizes:
        raise ConfigError(
            f"model.quantization={config.model.quantization}: backend {backend.name} computes with the "
            "weights as they are: leave it out, or take another backend"
        )
    slots, layers = model.stream_layers, len(model.spec.layers)
    if slots is not None and not backend.streams:
        raise ConfigError(
            f"model.stream_layers={slots}: backend {backend.name} has all layers in memory: take backend=eager, or "
            "leave it out"
        )
    if slots is not None and not 1 <= slots <= layers:
        raise ConfigError(
            f"model.stream_layers={slots} is out of range: {config.model.reference} has {layers} layers, of which 1 to "
            f"{layers} can be in memory at once (null, or --no-stream, for all)"
        )
    _check_processes(config, backend)
    _ = model.adapter


def _check_processes(config: Config, backend: Backend) -> None:
    wanted, there = config.parallel.tensor, count()
    most = max(wanted, there)
    if wanted < 1:
        raise ConfigError(f"parallel.tensor={wanted} is out of range: at least 1 is expected")
    if wanted > 1 and not backend.splits:
        raise ConfigError(
            f"parallel.tensor={wanted}: backend {backend.name} computes in one process: take backend=eager, or leave "
            "it out"
        )
    if wanted > 1 and config.engine.determinism == "invariant":
        raise ConfigError(
            f"parallel.tensor={wanted}: sums over processes depend on how many rows there are: leave it out, or "
            "engine.determinism=invariant"
        )
    if wanted != there:
        raise ConfigError(
            f"parallel.tensor={wanted} takes as many processes, but there {'is' if there == 1 else 'are'} {there}: "
            f"start them with `torchrun --nproc-per-node {most} -m xinfer parallel.tensor={most}`"
        )


def check_engine(config: Config) -> None:
    """Refuse, before anything is read, what is configured of the engine beside its limits."""
    engine, choices = config.engine, ("off", "ngram", "draft")
    if engine.logprobs_mode not in MODES:
        raise ConfigError(f"engine.logprobs_mode={engine.logprobs_mode!r} is unknown (there are: {', '.join(MODES)})")
    if engine.timeout_s is not None and not engine.timeout_s > 0:
        raise ConfigError(f"engine.timeout_s={engine.timeout_s} is out of range: seconds above zero are expected")
    if engine.speculation not in choices:
        raise ConfigError(f"engine.speculation={engine.speculation!r} is unknown (there are: {', '.join(choices)})")
    if engine.draft_tokens < 1:
        raise ConfigError(f"engine.draft_tokens={engine.draft_tokens} is out of range: at least 1 is expected")
    if (engine.speculation == "draft") != (engine.draft_model is not None):
        raise ConfigError("engine.speculation=draft and engine.draft_model=REFERENCE go together: give both or neither")
