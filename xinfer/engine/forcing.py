"""Computes given tokens on a runner, choosing none: what a model says at every place of a text that is there."""

__all__ = ["forced", "forced_layers"]

from collections.abc import Iterator
from collections.abc import Sequence as Rows

from torch import Tensor

from xinfer.engine.batch import make_batch
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Limits, Request, SamplingParams, Sequence


def forced(
    runner: ModelRunner, limits: Limits, token_ids: Rows[int], first: int = 0, alone_from: int | None = None
) -> Iterator[Tensor]:
    """Yield float32 logits [n, V] piece by piece, of the tokens from `first` on; row i tells what follows token i.

    Nobody else may use the runner meanwhile.

    Args:
        runner: what computes.
        limits: what a step may hold.
        token_ids: at most as many as the runner and its cache take.
        first: from which token on logits are wanted.
        alone_from: from which token on each is computed by itself, as generated tokens are; None for never.
    """
    sequence = _sequence(runner, token_ids)
    alone = len(token_ids) if alone_from is None else alone_from
    while (done := sequence.num_computed) < len(token_ids):
        count = 1 if done >= alone else min(alone - done, limits.max_num_batched_tokens)
        count = min(count, max(first - done, 0) + limits.logits_rows)
        wanted = max(0, done + count - max(done, first))
        logits = runner.forward(make_batch([sequence], [count], [wanted], runner.info.block_size))
        sequence.num_computed += count
        if wanted:
            yield logits
    runner.free(sequence.blocks)


def forced_layers(runner: ModelRunner, token_ids: Rows[int]) -> list[Tensor]:
    """Return float32 [T, H] of the embedding and after each layer, of a runner that has the capability `layers`."""
    sequence = _sequence(runner, token_ids)
    told = runner.layers(make_batch([sequence], [len(token_ids)], [1], runner.info.block_size))
    runner.free(sequence.blocks)
    return told


def _sequence(runner: ModelRunner, token_ids: Rows[int]) -> Sequence:
    """Return a sequence that has these tokens, and the runner's first blocks."""
    tokens = [int(token) for token in token_ids]
    request = Request("0", 0, tuple(tokens), SamplingParams(), 0)
    sequence = Sequence(request, tokens, limit=len(tokens) + 1)
    sequence.blocks = list(range(-(-len(tokens) // runner.info.block_size)))
    return sequence
