"""Given tokens are computed however a step's limits cut them, and every row is that of the whole context before it."""

import numpy as np
import pytest
import torch
from engines import VOCAB, fake

from xinfer.engine.forcing import forced
from xinfer.engine.types import Limits
from xinfer.testing.fake import context_logits

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 70)


@pytest.mark.parametrize("first", [0, 1, 33, 69])
@pytest.mark.parametrize("alone_from", [None, 1, 33, 69])
@pytest.mark.parametrize("limits", [Limits(), Limits(max_num_batched_tokens=7, max_num_seqs=2, max_logits_rows=3)])
def test_every_row_is_that_of_its_context(first: int, alone_from: int | None, limits: Limits):
    runner = fake(max_logits_rows=limits.logits_rows)
    calls = []
    forward = runner.forward
    runner.forward = lambda batch: calls.append(len(batch.token_ids)) or forward(batch)
    rows = torch.cat(list(forced(runner, limits, TOKENS, first, alone_from)))
    expected = [context_logits(TOKENS[: end + 1], VOCAB) for end in range(first, len(TOKENS))]
    assert np.array_equal(rows.numpy(), np.array(expected))
    assert sum(calls) == len(TOKENS) and max(calls) <= limits.max_num_batched_tokens
    if alone_from is not None:
        assert calls[-(len(TOKENS) - alone_from) :] == [1] * (len(TOKENS) - alone_from)
