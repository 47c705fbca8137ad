"""xinfer: one generation core, many backends, nothing left to chance."""

__all__ = [
    "API_VERSION",
    "LLM",
    "AsyncEngine",
    "Backend",
    "BackendContext",
    "Batch",
    "Delta",
    "Engine",
    "FinishReason",
    "GenerateOutput",
    "Limits",
    "ModelRunner",
    "RequestOutput",
    "RunnerInfo",
    "SamplingParams",
    "XinferError",
    "__version__",
    "hookimpl",
]

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xinfer.backends import API_VERSION, Backend, BackendContext
from xinfer.engine.engine import Engine
from xinfer.engine.outputs import RequestOutput
from xinfer.engine.runner import ModelRunner, RunnerInfo
from xinfer.engine.types import Batch, FinishReason, Limits, SamplingParams
from xinfer.errors import XinferError
from xinfer.hookspecs import hookimpl

if TYPE_CHECKING:
    from xinfer.api.async_engine import AsyncEngine
    from xinfer.api.llm import LLM
    from xinfer.api.requests import Delta, GenerateOutput

# Imported when first asked for: they need Hydra (0.1 s), which a plugin that imports xinfer does not.
_LATER = {
    "LLM": "xinfer.api.llm",
    "AsyncEngine": "xinfer.api.async_engine",
    "Delta": "xinfer.api.requests",
    "GenerateOutput": "xinfer.api.requests",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'xinfer' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
