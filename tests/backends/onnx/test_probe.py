"""What is found out of a runner: here one of whom it is known."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from xinfer.backends.onnx.probe import probe
from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Batch, Limits


def forward(off: Callable[[int, int, int], bool]) -> Callable[[Batch], Tensor]:
    """Return rows that tell a token and its position, and are `off(position, new tokens, sequences)`."""

    def compute(batch: Batch) -> Tensor:
        new = np.repeat(np.diff(batch.query_starts), np.diff(batch.query_starts))
        count = len(batch.context_lens)
        different = [off(*each, count) for each in zip(batch.positions.tolist(), new.tolist(), strict=True)]
        return torch.from_numpy(np.stack([batch.token_ids, batch.positions, different], 1).astype(np.float32))

    return compute


def found(off: Callable[[int, int, int], bool], budget: int) -> set[str]:
    """Return what is the same."""
    info = RunnerInfo(vocab_size=50, max_model_len=128, block_size=128, num_blocks=16, kv_tokens=2048, device="cpu")
    findings = probe(forward(off), Limits(max_num_seqs=8, max_num_batched_tokens=budget), info)
    return {name for name in ("batch", "chunk", "joined", "decode") if getattr(findings, name)}


BUDGETS = [3, 4, 23, 35, 48, 69, 70, 71, 128, 512]
ALL = {"batch", "chunk", "joined", "decode"}


def all_tried(budget: int) -> set[str]:
    """What can be found where a step holds so many tokens: the two shortest prompts that are tried have 35."""
    return ALL if budget >= 35 else ALL - {"joined"}


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_the_same_is_found_so(budget: int) -> None:
    assert found(lambda position, new, sequences: False, budget) == all_tried(budget)


@pytest.mark.parametrize("budget", BUDGETS[3:])
def test_pieces_differ_in_contexts_longer_than_a_step(budget: int) -> None:
    """A sequence gets as long as a model takes, whatever a step holds."""
    odd = found(lambda position, new, sequences: position >= 60 and new > 1 and new % 2 == 1, budget)
    assert odd == {"batch", "joined"}


@pytest.mark.parametrize("budget", BUDGETS[2:])
def test_single_tokens_alone_may_differ(budget: int) -> None:
    assert found(lambda position, new, sequences: new == 1, budget) == all_tried(budget) - {"decode"}


@pytest.mark.parametrize("budget", BUDGETS[3:])
def test_company_makes_a_difference(budget: int) -> None:
    assert found(lambda position, new, sequences: sequences > 1, budget) == {"chunk", "decode"}
