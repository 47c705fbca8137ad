"""What a row of logits depends on besides its own sequence: found by trying, on the model as it was loaded."""

__all__ = ["Findings", "probe"]

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Batch, Limits

Forward = Callable[[Batch], Tensor]

_LENGTHS = (70, 33, 37, 2, 69)  # of prompts that are tried; also those of a chunk's end are no multiples of anything
_CUTS = ((33,), (2,), (16, 32), (64,), (35, 68))  # where the first is cut
_STEPS = 3  # generated tokens


@dataclass(frozen=True, slots=True)
class Findings:
    """Whether rows are the same bit for bit.

    Attributes:
        batch: whoever else decodes in the step.
        chunk: however a prompt is cut, but for single tokens.
        joined: whether several prompts are computed in one call.
        decode: whether a token is computed alone or within a longer piece.
    """

    batch: bool
    chunk: bool
    joined: bool
    decode: bool


def probe(forward: Forward, limits: Limits, info: RunnerInfo) -> Findings:
    """Compute random texts in several ways and compare; whatever is in the cache is overwritten."""
    rng = np.random.default_rng(0)
    room = min(limits.max_num_batched_tokens, limits.logits_rows)  # contexts get longer than that, piece by piece
    count = min(limits.max_num_seqs, info.num_blocks)
    longest = info.max_model_len - _STEPS
    texts = [rng.integers(0, info.vocab_size, min(length, longest) + _STEPS).astype(np.int32) for length in _LENGTHS]
    ends = [len(text) - _STEPS for text in texts]

    def rows(pieces: list[tuple[int, int, int]]) -> Tensor:
        """Return logits of all tokens of these pieces, (text, start, end), the first in the first block, and so on."""
        return forward(_batch([(texts[text], start, end) for text, start, end in pieces], info.block_size)).clone()

    def cut(text: int, places: tuple[int, ...] = ()) -> Tensor:
        """Return logits of all of a prompt's tokens, computed in pieces that end there, and where a call is full."""
        return torch.cat([rows([(text, *piece)]) for piece in _pieces(places, ends[text], room)])

    whole = [cut(text) for text in reversed(range(len(texts)))][::-1]
    steps = [(0, ends[0] + step, ends[0] + step + 1) for step in range(_STEPS)]
    alone = [rows([step]) for step in steps]
    chunk = all(torch.equal(cut(0, places), whole[0]) for places in _CUTS)
    batch = True
    for others in sorted({1, 3, 6, count - 1} & set(range(1, count))):
        batch &= all(
            torch.equal(rows([step] * (others + 1))[:1], found) for step, found in zip(steps, alone, strict=True)
        )
    decode = torch.equal(rows([(0, ends[0], ends[0] + _STEPS)]), torch.cat(alone))
    together: list[tuple[int, int, int]] = []
    for text, end in sorted(enumerate(ends), key=lambda each: each[1]):  # the shortest first: several, if they fit
        if len(together) < count and sum(other for _, _, other in together) + end <= room:
            together.append((text, 0, end))
    # Where no two fit into a call nothing was tried, and nothing is promised.
    joined = len(together) > 1 and torch.equal(rows(together), torch.cat([whole[text] for text, _, _ in together]))
    return Findings(batch, chunk, joined, decode)


def _pieces(cuts: tuple[int, ...], end: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces of a prompt start and end, none larger than a call; a single token only if that is all."""
    for start, stop in pairwise([0, *(cut for cut in cuts if cut <= end - 2), end]):
        while start < stop:
            size = min(room, stop - start)
            size -= size > 2 and stop - start - size == 1
            yield start, start + size
            start += size


def _batch(pieces: list[tuple[NDArray[np.int32], int, int]], block_size: int) -> Batch:
    """Return a step of these pieces, each in a block of its own, in which every token's logits are wanted."""
    blocks = range(len(pieces))
    lengths = np.array([end - start for _, start, end in pieces], np.int32)
    positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in pieces])
    owners = np.repeat(np.array(blocks, np.int64), lengths)
    return Batch(
        token_ids=np.concatenate([text[start:end] for text, start, end in pieces]),
        positions=positions,
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_lens=np.array([end for _, _, end in pieces], np.int32),
        block_tables=np.array(blocks, np.int32)[:, None],
        slot_mapping=owners * block_size + positions,
        sample_at=np.arange(len(positions), dtype=np.int32),
        adapters=np.zeros(len(pieces), np.int32),
    )
