"""What has to be alike for two benchmarks to be compared, and what may differ: the code."""

__all__ = ["build", "facts"]

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import xinfer
from xinfer import hardware
from xinfer.engine.sampler import effective
from xinfer.engine.types import Limits
from xinfer.records.provenance import git_state
from xinfer.session import Session

_VERSIONS = ("python", "torch", "numpy", "onnxruntime", "onnxruntime-gpu")
_ENGINE = (*(field.name for field in fields(Limits)), "speculation", "draft_tokens", "draft_model")


def facts(session: Session) -> dict[str, Any]:
    """Return what decides speed besides the code, by dotted name; the runner must be there already."""
    config, info, machine = session.config, session.runner.info, hardware.describe()
    backend = {name: value for name, value in vars(config.backend).items() if name not in ("name", "threads")}
    hashes = {name: compute() for name, compute in session.hashes().items() if name in ("weights", "spec", "adapter")}
    parts: dict[str, dict[str, Any]] = {
        "hardware": {
            "cpu": machine.cpu,
            "physical_cores": machine.physical_cores,
            "logical_cores": machine.logical_cores,
            "memory_gib": round(machine.memory / 2**30),
            "gpus": [asdict(gpu) for gpu in machine.gpus],
            "device": info.device,
            "threads": info.threads or None,
        },
        "model": {
            "name": Path(config.model.reference.partition("#")[0]).name if session.computes_checkpoint else None,
            "load_format": config.model.load_format,
            "dtype": info.dtype,
            "quantization": config.model.quantization,
            "quantization_scheme": repr(session.quantization),
            "stream_layers": config.model.stream_layers,
            **hashes,
        },
        "backend": {"name": session.backend.name, **backend},
        "engine": {name: getattr(config.engine, name) for name in _ENGINE},
        "sampling": {"effective": effective(session.params)},
        "parallel": {"tensor": config.parallel.tensor},
        "versions": {name: found for name, found in hardware.versions().items() if name in _VERSIONS},
    }
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def build() -> dict[str, Any]:
    """Return version, commit and whether the code differs from it."""
    git = git_state(Path(xinfer.__file__).parent) or {"commit": None, "dirty": None}
    return {"version": xinfer.__version__, **git}
