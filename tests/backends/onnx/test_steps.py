"""A step's rows of logits are the sequence's own: whatever its sizes, who shares it, and in which order they come."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from cases import TOLERANCE, Case, difference, expected, model_of, onnx_runner
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xinfer.backends.onnx.operators import takes
from xinfer.backends.onnx.runner import _CALL, cuts
from xinfer.engine.batch import make_batch
from xinfer.engine.types import Limits
from xinfer.engine.types import Sequence as Tokens
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.stepper import Stepper
from xinfer.testing.tiny import tiny_config, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")

# One that turns inside the operator, with windows; one that turns outside of it; one that turns nothing but adds
# positions; one whose scores are capped.
MODELS = (("mistral", "window"), ("llama", "linear"), ("gpt2", "usual"), ("gemma2", "usual"))


@pytest.fixture(scope="module", params=MODELS, ids=lambda param: "-".join(param))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("steps"), shape(*request.param), write=write_reference, max_len=80)


@pytest.fixture
def runner(case: Case) -> Stepper:
    return case.ours(backend="onnx")


def begun(runner: Stepper, case: Case, lengths: list[int], past: list[int]) -> list[Tokens]:
    """Return sequences of these lengths, the first tokens of which are computed, each alone."""
    sequences = [runner.start(case.prompt(length, seed)) for seed, length in enumerate(lengths)]
    for sequence, there in zip(sequences, past, strict=True):
        if there:
            runner.step([sequence], [there])
    return sequences


SIZES = [(1, 5, 0), (3, 1, 7), (2, 17, 3), (8, 1, 1), (1, 79, 0), (1, 1, 79), (1, 40, 40), (8, 9, 0), (5, 2, 30)]


@pytest.mark.parametrize(("rows", "tokens", "past"), SIZES)
def test_any_sizes_give_what_eager_gives(case: Case, runner: Stepper, rows: int, tokens: int, past: int) -> None:
    """Case O02: no size of an example may be left in the graph."""
    counts = [tokens] * rows
    ours, theirs = (
        torch.cat(side.step(begun(side, case, [past + tokens] * rows, [past] * rows), counts))
        for side in (runner, case.ours())
    )
    assert difference(ours, theirs) <= TOLERANCE


def test_random_sizes_give_what_eager_gives(case: Case) -> None:
    rng = np.random.default_rng(3)
    for _ in range(10):
        rows = int(rng.integers(1, 9))
        lengths = rng.integers(1, 80, rows)
        past = rng.integers(0, lengths) * rng.integers(0, 2, rows)
        sides = []
        for backend in ("onnx", "eager"):
            side = case.ours(backend=backend)
            sides.append(
                torch.cat(side.step(begun(side, case, lengths.tolist(), past.tolist()), (lengths - past).tolist()))
            )
        assert difference(*sides) <= TOLERANCE


def wanting(runner: Stepper, sequences: list[Tokens], counts: list[int], wanted: list[int]) -> Tensor:
    """Compute the next tokens, and the logits of so many of each sequence's last."""
    for sequence in sequences:
        if not sequence.blocks:
            sequence.blocks = [runner._free.pop()]
    logits = runner.runner.forward(make_batch(sequences, counts, wanted, runner.runner.info.block_size))
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.num_computed += count
    return logits


def mixed(runner: Stepper, case: Case) -> tuple[list[Tokens], list[int]]:
    """Return sequences of all kinds and their new tokens: fresh, in the middle of a prompt, and generating."""
    lengths = [1, 30, 17, 3, 40, 29, 12, 50]
    past = [0, 0, 16, 0, 22, 0, 11, 8]
    return begun(runner, case, lengths, past), [a - b for a, b in zip(lengths, past, strict=True)]


def test_kinds_and_lengths_together_are_as_alone_in_any_order(case: Case, runner: Stepper) -> None:
    reference = case.reference()
    lengths = [len(each.token_ids) for each in mixed(runner, case)[0]]
    theirs = [expected(reference, case.prompt(length, seed), 80) for seed, length in enumerate(lengths)]
    rng = np.random.default_rng(5)
    for _ in range(4):
        runner = case.ours(backend="onnx")
        sequences, counts = mixed(runner, case)
        order = rng.permutation(len(sequences)).tolist()
        for i, logits in zip(
            order, runner.step([sequences[i] for i in order], [counts[i] for i in order]), strict=True
        ):
            assert difference(logits, theirs[i][-counts[i] :]) <= TOLERANCE


def test_only_the_rows_asked_for_come_and_in_their_order(case: Case, runner: Stepper) -> None:
    """Some sequences want their last token, some all, some none (a prompt's middle)."""
    sequences, counts = mixed(runner, case)
    everything = runner.step(sequences, counts)
    for seed in range(4):
        other = case.ours(backend="onnx")
        sequences, counts = mixed(other, case)
        wanted = [int(n) for n in np.random.default_rng(seed).integers(0, np.array(counts) + 1)]
        logits = wanting(other, sequences, counts, wanted)
        kept = torch.cat([each[len(each) - n :] for each, n in zip(everything, wanted, strict=True)])
        assert logits.dtype == torch.float32
        assert difference(logits, kept) <= TOLERANCE


def test_a_step_of_which_nothing_is_wanted_is_remembered_all_the_same(case: Case, runner: Stepper) -> None:
    reference, counts = case.reference(), [19, 7, 1]
    sequences = [runner.start(case.prompt(20, seed)) for seed in range(3)]
    assert wanting(runner, sequences, counts, [0, 0, 0]).shape == (0, case.config["vocab_size"])
    for seed, logits in enumerate(runner.step(sequences, [20 - count for count in counts])):
        assert difference(logits, expected(reference, case.prompt(20, seed), 80)[counts[seed] :]) <= TOLERANCE


def test_a_copied_beginning_serves_another_sequence_also_when_its_source_is_freed(case: Case, runner: Stepper) -> None:
    reference, prompt = case.reference(), case.prompt(40)
    source = begun(runner, case, [40], [40])[0]
    for tokens in (1, 16, 39):
        target = runner.start([*prompt[:tokens], *case.prompt(30, seed=tokens)])
        target.blocks, target.num_computed = [runner._free.pop()], tokens
        runner.runner.copy(source.blocks[0], target.blocks[0], tokens)
        if tokens == 39:
            runner.runner.free(source.blocks)
        theirs = expected(reference, target.token_ids, 80)
        assert difference(runner.step([target], [10])[0], theirs[tokens : tokens + 10]) <= TOLERANCE
        assert difference(runner.step([target], [20])[0], theirs[tokens + 10 :]) <= TOLERANCE


def test_blocks_can_be_freed_or_just_taken_by_another_while_others_go_on(case: Case, runner: Stepper) -> None:
    """A block that is taken at once is not freed before: what it held must not be seen."""
    reference, rng = case.reference(), np.random.default_rng(4)
    staying = begun(runner, case, [70, 60], [10, 5])
    for seed in range(6):
        passing = [runner.start(case.prompt(int(rng.integers(1, 60)), 9 + seed * 4 + i)) for i in range(4)]
        together = [*passing, *staying]
        counts = [*[len(each.token_ids) for each in passing], 1 + seed, 9]
        starts = [each.num_computed for each in together]
        for sequence, logits, start in zip(together, runner.step(together, counts), starts, strict=True):
            theirs = expected(reference, sequence.token_ids[: sequence.num_computed], 80)
            assert difference(logits, theirs[start:]) <= TOLERANCE
        if seed % 2:
            runner.runner.free([block for each in passing for block in each.blocks])
        for sequence in passing:
            runner.finish(sequence)


# Memory

DEEP = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
LENGTH, ROWS = 1024, 8  # of 16 KiB a token: 128 MiB in all


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory is given back only at the end")
def test_free_and_close_give_memory_back(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_config("llama", max_position_embeddings=LENGTH, **DEEP), seed=0)
    start = resident()
    runner = Stepper(onnx_runner(model_of(folder), Limits(max_num_seqs=ROWS, max_num_batched_tokens=256)))
    assert runner.runner.info.kv_token_bytes == 16 << 10
    runner.greedy(range(1, 65), [64], 1)  # so that what computing takes is there
    before = resident()
    sequences = [runner.start([1] * LENGTH) for _ in range(ROWS)]
    for sequence in sequences:
        for _ in range(LENGTH // 256):
            runner.step([sequence], [256])
    full = resident()
    assert full - before > 100e6
    assert runner.runner.metrics()["mem_used"] > before + 100e6
    runner.runner.free([block for each in sequences[:4] for block in each.blocks])
    assert full - resident() > 50e6
    runner.runner.close()
    assert resident() - start < 100e6


# What shares a call


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9).map(sorted))
def test_calls_are_those_that_take_least(lengths: list[int]) -> None:
    """Of all ways to cut a list that ascends none takes less than what is found."""
    assert taken(lengths, cuts(np.array(lengths))) == min(
        taken(lengths, [at + 1 for at in range(len(lengths) - 1) if ways >> at & 1])
        for ways in range(1 << len(lengths) - 1)
    )


def taken(lengths: list[int], at: list[int]) -> int:
    parts = pairwise([0, *at, len(lengths)])
    return sum(_CALL + (end - start) * lengths[end - 1] for start, end in parts)


def test_calls_hold_every_sequence_once_and_what_can_share_them(case: Case) -> None:
    """Prompts at their beginning join; where the operator is told of lengths, whatever has room for the longest."""
    for ragged in (False, takes("GroupQueryAttention", "query_seqlens")):
        runner = case.ours(backend="onnx")
        runner.runner._ragged = ragged
        sequences = begun(runner, case, [8, 9, 15, 16, 31, 80, 79], [0, 0, 10, 10, 30, 79, 75])
        counts = [8, 9, 5, 6, 1, 1, 4]
        batch = make_batch(sequences, counts, counts, runner.runner.info.block_size)
        groups = {tuple(sorted(group.tolist())) for group in runner.runner._groups(batch)}
        wanted = {(0, 1), (2, 3, 4), (5,), (6,)} if ragged else {(0, 1), (2,), (3,), (4, 5), (6,)}
        assert groups == wanted
