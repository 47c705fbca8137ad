"""A step on its way: given to the runner, its tokens not seen yet."""

__all__ = ["Flight", "looks", "rows_of"]

from dataclasses import dataclass

from torch import Tensor

from xinfer.engine.sampler import Drawn
from xinfer.engine.schedule import Schedule
from xinfer.engine.transfer import send
from xinfer.engine.types import Sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is being computed.

    Attributes:
        plan: what it does.
        logits: float32 [K, V].
        drawn: one token for each of `plan.sampled`; None where there are none.
        waiting: sequences that waited when it began.
    """

    plan: Schedule
    logits: Tensor
    drawn: Drawn | None
    waiting: int

    @property
    def awaited(self) -> bool:
        """Whether anybody is left whom its results concern."""
        return any(sequence.finish_reason is None for sequence in self.plan.sequences)

    def name_tokens(self) -> None:
        """Give each sequence that gets a token the name by which the next step knows it (see `Batch.token_ids`)."""
        for place, sequence in enumerate(self.plan.sampled):
            if sequence.finish_reason is None and len(sequence.token_ids) < sequence.limit:
                sequence.token_ids.append(-1 - place)


def looks(sequence: Sequence) -> bool:
    """Whether a request's tokens decide about its next row of logits, or more is told of them than what they are."""
    params = sequence.request.params
    return sequence.adjusts or bool(params.extra) or params.logprobs is not None or params.prompt_logprobs is not None


def rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    """Return these rows of logits [K, V]: a copy, unless they are all."""
    everything = len(rows) == len(logits) and rows == list(range(len(rows)))
    return logits if everything else logits[send(rows, logits.device)]
