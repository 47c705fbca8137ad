"""What a plugin may implement.

Mark an implementation with `xinfer.hookimpl`, in a module that an entry point of the group `xinfer` names.
"""

__all__ = ["hookimpl", "hookspec"]

from typing import TYPE_CHECKING, Any

from pluggy import HookimplMarker, HookspecMarker

if TYPE_CHECKING:
    from xinfer.backends import Backend
    from xinfer.engine.logits import LogitsProcessor
    from xinfer.engine.outputs import RequestOutput, StepOutput, TokenOutput
    from xinfer.engine.runner import RunnerInfo
    from xinfer.engine.types import Request
    from xinfer.models.families import Family
    from xinfer.records import Run

hookspec = HookspecMarker("xinfer")
hookimpl = HookimplMarker("xinfer")


@hookspec
def xinfer_backends() -> "list[Backend]":  # type: ignore[empty-body]
    """Return backends; called at start, collected from all plugins."""


@hookspec
def xinfer_configs() -> list[tuple[str, str, type]]:  # type: ignore[empty-body]
    """Return configs of a plugin that is no backend, (group, name, dataclass) each; called at start, collected."""


@hookspec
def xinfer_model_families() -> "list[Family]":  # type: ignore[empty-body]
    """Return model families; called at start, collected from all plugins."""


@hookspec(firstresult=True)
def xinfer_tokenizer(model: Any) -> Any:
    """Return a tokenizer for a model whose format brings its own, or None; the first answer counts."""


@hookspec
def xinfer_logits_processors(info: "RunnerInfo") -> "list[LogitsProcessor]":  # type: ignore[empty-body]
    """Return logits processors; called once per engine, collected from all plugins."""


@hookspec
def xinfer_on_run_start(run: "Run") -> None:
    """Hear that a run begins: its folder, config and model are known, nothing has been computed."""


@hookspec
def xinfer_on_run_end(run: "Run") -> None:
    """Hear that a run has ended, with its status and figures."""


@hookspec
def xinfer_on_step(step: "StepOutput") -> None:
    """Hear of each step of the engine."""


@hookspec
def xinfer_on_token(sequence: "Request", token: "TokenOutput") -> None:
    """Hear of each token."""


@hookspec
def xinfer_on_request_finished(output: "RequestOutput") -> None:
    """Hear of each request that ended, for whatever reason."""
