"""xinfer: one generation core, many backends, nothing left to chance."""

__all__ = [
    "Backend",
    "BackendContext",
    "Batch",
    "Engine",
    "Limits",
    "ModelRunner",
    "RunnerInfo",
    "SamplingParams",
    "XinferError",
    "__version__",
    "hookimpl",
]

__version__ = "0.1.0"

from xinfer.backends import Backend, BackendContext
from xinfer.engine.engine import Engine
from xinfer.engine.runner import ModelRunner, RunnerInfo
from xinfer.engine.types import Batch, Limits, SamplingParams
from xinfer.errors import XinferError
from xinfer.hookspecs import hookimpl
