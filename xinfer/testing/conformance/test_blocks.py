"""Keys and values lie where the block tables say, and nowhere else."""

__all__: list[str] = []

import numpy as np
import pytest

from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Sequence as Tokens
from xinfer.testing.conformance.checked import Alone, Checked
from xinfer.testing.conformance.subject import Subject

pytestmark = pytest.mark.quick


def test_blocks_may_lie_in_any_order(subject: Subject, runner: ModelRunner, alone: Alone) -> None:
    """A sequence's blocks are neither neighbours nor ascending."""
    count = min(runner.info.num_blocks, 40)
    orders = [range(count), range(count - 1, -1, -1), [*range(0, count, 2), *range(1, count, 2)]]
    for blocks in orders:
        checked = Checked(runner, alone, subject.tolerance_of(runner), blocks=blocks)
        sequences = [checked.start(checked.text(60, seed)) for seed in range(2)]
        for _ in range(6):  # in turns, so that their blocks are mixed
            checked.step(sequences, [10, 10])


def test_all_blocks_can_be_used(subject: Subject, runner: ModelRunner, alone: Alone) -> None:
    """As many sequences as there are blocks, the first and the last among them, each hold what was written there."""
    info = runner.info
    length = min(info.block_size, info.kv_tokens // info.num_blocks, 16)
    blocks = [*range(min(32, info.num_blocks)), *range(max(32, info.num_blocks - 32), info.num_blocks)]
    checked = Checked(runner, alone, subject.tolerance_of(runner), blocks=blocks)
    sequences = [checked.start(checked.text(length, seed)) for seed in range(len(blocks))]
    for sequence in sequences:
        checked.step([sequence], [length - 1 or 1])
    for sequence in sequences if length > 1 else []:
        checked.step([sequence], [1])


def test_a_block_can_be_taken_by_another_sequence(checked: Checked) -> None:
    """What was there before is not seen, also where a shorter text takes a longer one's blocks."""
    rng = np.random.default_rng(0)
    for seed in range(8):
        sequences = [checked.start(checked.text(int(rng.integers(1, 90)), seed=seed * 2 + i)) for i in range(2)]
        checked.step(sequences, [len(sequence.token_ids) for sequence in sequences])
        for sequence in sequences:
            checked.finish(sequence)


def test_a_copied_block_is_like_its_source(checked: Checked) -> None:
    """A text goes on from a copy of its last block, of which so many tokens count, as it does from the block itself."""
    _need(checked.runner, "copy")
    size = min(checked.runner.info.block_size, 48)
    for tokens in sorted({1, size // 2, size - 1, size} - {0}):
        source = checked.start(checked.text(size + 8, seed=tokens))
        checked.step([source], [tokens])
        target = _forked(checked, source, tokens)
        checked.step([target], [8])


def test_a_copied_block_leads_a_life_of_its_own(checked: Checked) -> None:
    """What is written behind a copy is not seen in its source, nor the other way round."""
    _need(checked.runner, "copy")
    tokens = max(1, min(checked.runner.info.block_size, 48) // 2)
    source = checked.start(checked.text(tokens))
    checked.step([source], [tokens])
    target = _forked(checked, source, tokens)
    for sequence, seed in ((source, 1), (target, 2)):
        sequence.token_ids += checked.text(6, seed)
    for _ in range(6):
        checked.step([source, target], [1, 1])


def test_freed_blocks_harm_no_other(checked: Checked) -> None:
    """Blocks that are given back can be taken again; those of others stay as they are."""
    _need(checked.runner, "free")
    stays, goes = (checked.start(checked.text(60, seed)) for seed in range(2))
    checked.step([stays, goes], [40, 40])
    blocks = list(goes.blocks)
    checked.runner.free(blocks)
    checked.finish(goes)
    comes = checked.start(checked.text(50, seed=2))
    checked.step([comes, stays], [40, 10])
    checked.step([stays, comes], [10, 10])


def _need(runner: ModelRunner, capability: str) -> None:
    if capability not in runner.info.capabilities:
        pytest.skip(f"RunnerInfo.capabilities does not name {capability}")


def _forked(checked: Checked, source: Tokens, tokens: int) -> Tokens:
    """Return a sequence that begins like this one, which has one block with so many tokens, in a block of its own."""
    target = checked.start(source.token_ids)
    checked.take(target)
    checked.runner.copy(source.blocks[0], target.blocks[0], tokens)
    target.num_computed = tokens
    return target
