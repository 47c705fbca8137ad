"""Who wants to hear of what happens."""

__all__ = ["NOBODY", "Observers"]

from collections.abc import Callable
from dataclasses import dataclass

from xinfer.engine.outputs import RequestOutput, StepOutput, TokenOutput
from xinfer.engine.types import Request


@dataclass(frozen=True, slots=True)
class Observers:
    """Functions that hear of events. They get immutable snapshots and must not raise; empty costs nothing."""

    on_step: tuple[Callable[[StepOutput], None], ...] = ()
    on_token: tuple[Callable[[Request, TokenOutput], None], ...] = ()
    on_request_finished: tuple[Callable[[RequestOutput], None], ...] = ()

    def tell(self, output: StepOutput) -> None:
        """Tell of a step: its tokens, then its results, then the step. One of them may abort a request."""
        for on_token in self.on_token:
            for token in output.tokens:
                on_token(token.request, token)
        for on_finished in self.on_request_finished:
            for result in output.finished:
                on_finished(result)
        for on_step in self.on_step:
            on_step(output)


NOBODY = Observers()
