"""What a backend offers to xinfer. Each one lies in a folder of its own and imports what is heavy inside `create`."""

__all__ = ["Backend", "BackendContext"]

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Limits
from xinfer.models.model import Model


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a runner is made from.

    Attributes:
        model: the model, of which nothing has been read yet; a backend that brings its own need not touch it.
        config: an instance of the backend's own config class.
        limits: what the engine will ask of the runner at most.
    """

    model: Model
    config: Any
    limits: Limits


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend as a plugin offers it.

    Attributes:
        name: as in `backend=NAME`.
        config: a dataclass whose fields are the keys `backend.…`; every field has a default.
        create: makes the runner.
        summary: one line for `xinfer plugins` and `--help`.
        tokenizer: from the context to the tokenizer, for a backend that computes no checkpoint; None takes the model's.
    """

    name: str
    config: type
    create: Callable[[BackendContext], ModelRunner]
    summary: str = ""
    tokenizer: Callable[[BackendContext], Any] | None = None
