"""Recorded decode steps compute what steps compute that are not, whoever shares them and however they are filled up.

There is no CUDA device here. What stands in for a CUDA graph computes again on the memory that was recorded, and leaves
what it computes where the next one of any size does.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import PROMPT, TOLERANCE, Case, difference, expected, in_company, model_of, spoil
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xinfer import Engine, SamplingParams
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.captured import Recordings, Replay, sizes
from xinfer.backends.torch.decoder import AnyStep
from xinfer.backends.torch.paged import PagedStep
from xinfer.backends.torch.runner import TorchRunner
from xinfer.backends.torch.trial import largest_steps
from xinfer.engine.types import Limits
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper

LIMITS = Limits(max_model_len=100, max_num_seqs=11, max_num_batched_tokens=64, kv_memory=64e6)
FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v3"]  # capped, sinks and windows, experts, latent


class Again:
    """Stands in for `CudaRecorder`, and counts replays by size."""

    def __init__(self) -> None:
        self.replays: Counter[int] = Counter()
        self.recorded: list[int] = []
        self.memory: Tensor | None = None

    def __call__(self, compute: Replay) -> Replay:
        first = compute()
        self.memory = first.clone() if self.memory is None else self.memory
        memory = self.memory[: len(first)]
        assert memory.shape == first.shape, "the largest comes first"
        self.recorded.append(len(first))

        def replay() -> Tensor:
            self.replays[len(memory)] += 1
            return memory.copy_(compute())

        return replay


class Recorded(TorchRunner):
    """`backend=eager`, its decode steps recorded."""

    spare_blocks = 1

    def __init__(self, context: BackendContext, record: Again) -> None:
        super().__init__(context)
        self.record, self.recordings = record, None
        longest, scratch, most = self.info.max_model_len, self.info.num_blocks, context.limits.max_num_seqs
        size = self.info.block_size
        with torch.inference_mode():
            self.recordings = Recordings(
                super().compute, most, longest, scratch, size, self.kernels, self.device, record
            )

    def compute(self, token_ids: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        assert isinstance(step, PagedStep)
        found = None if self.recordings is None else self.recordings(token_ids, positions, step)
        return super().compute(token_ids, positions, step) if found is None else found


def recorded(case: Case, limits: Limits = LIMITS) -> Recorded:
    runner = Recorded(BackendContext(model_of(case.folder), EagerConfig(device="cpu"), limits), Again())
    spoil(runner)
    return runner


def case_of(family: str, folder: Path) -> Case:
    return Case(folder, shape(family, next(iter(SHAPES[family]))), write=write_reference, max_len=100)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of("llama", tmp_path_factory.mktemp("llama"))


@given(most=st.integers(1, 600))
def test_any_number_of_sequences_has_a_size_that_is_hardly_larger(most: int) -> None:
    found = sizes(most)
    assert found == sorted(set(found))
    assert found[-1] == most
    for count in range(1, most + 1):
        size = min(each for each in found if each >= count)
        assert size < 2 * count
        assert size < count + 8


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference_in_any_company(family: str, tmp_path: Path) -> None:
    case = case_of(family, tmp_path)
    runner, reference = recorded(case), case.reference()
    for sequence, logits in in_company(Stepper(runner), case):
        theirs = expected(reference, sequence.token_ids[: sequence.num_computed], 100)
        assert difference(logits, theirs) <= TOLERANCE
    assert runner.record.recorded == [11, 8, 4, 2, 1]
    assert runner.record.replays


def test_a_random_workload_has_the_tokens_that_it_has_without(llama: Case) -> None:
    rng = np.random.default_rng(3)
    plain = TorchRunner(BackendContext(model_of(llama.folder), EagerConfig(device="cpu"), LIMITS))
    runner = recorded(llama)
    requests = [(llama.prompt(int(rng.integers(1, 40)), seed=i), int(rng.integers(1, 40))) for i in range(30)]
    requests += [(llama.prompt(2), 70), (llama.prompt(3), 80)]  # which are left at last
    told: list[dict[str, tuple[int, ...]]] = []
    for each in (plain, runner):
        engine = Engine(each, None, LIMITS, seed=7)
        for i, (prompt, tokens) in enumerate(requests):
            engine.add_request(prompt, SamplingParams(temperature=i % 2, max_tokens=tokens, ignore_eos=True))
        outputs = [output for step in engine.run() for output in step.finished]
        told.append({output.request_id: tuple(output.token_ids) for output in outputs})
    assert told[0] == told[1]
    assert len(told[0]) == 32
    assert set(runner.record.replays) == {1, 2, 4, 8, 11}, "a size that was never used was not tried"


def test_logits_are_the_callers_for_good(llama: Case) -> None:
    stepper = Stepper(recorded(llama))
    sequences = [stepper.start(llama.prompt(5, seed=i)) for i in range(3)]
    for sequence in sequences:
        stepper.step([sequence], [5])
        sequence.token_ids += llama.prompt(5, seed=9)
    batch = stepper.batch(sequences, [1, 1, 1])
    first = stepper.forward(batch)
    before = first.clone()
    for _ in range(3):
        stepper.step(sequences[::-1], [1, 1, 1])
    assert torch.equal(first, before)


def test_what_fills_up_a_step_writes_where_nobody_reads(llama: Case) -> None:
    runner = recorded(llama)
    stepper, size = Stepper(runner), runner.info.block_size
    sequences = [stepper.start(llama.prompt(PROMPT, seed=i)) for i in range(7)]
    for count in (7, 5, 3, 6):  # the last of one step are nobody's in the next
        some = sequences[:count]
        for sequence in some:
            sequence.token_ids += llama.prompt(1, seed=count)
        batch = stepper.batch(some, [1] * count)
        before = [pool.clone() for pool in runner.pools]
        stepper.forward(batch)
        for sequence in some:
            sequence.num_computed += 1
        written = {int(slot) for slot in batch.slot_mapping}
        for pool, old in zip(runner.pools, before, strict=True):
            same = (pool == old) | (pool.isnan() & old.isnan())
            changed = {int(slot) for slot in (~same.all(1)).nonzero()[:, 0]}
            assert changed - {len(pool) - size} <= written


def test_only_the_logits_that_are_wanted_come_back(llama: Case) -> None:
    runner = recorded(llama)
    stepper = Stepper(runner)
    sequences = [stepper.start(llama.prompt(4, seed=i)) for i in range(4)]
    batch = stepper.batch(sequences, [1] * 4)
    every = stepper.forward(batch)
    again = stepper.forward(replace(batch, sample_at=np.array([3, 1], np.int32)))
    assert torch.equal(again, every[[3, 1]])


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        (LIMITS, (64, 11)),
        (Limits(max_model_len=30, max_num_seqs=2, max_num_batched_tokens=512, kv_memory=64e6), (60, 2)),
        (Limits(max_model_len=30, max_num_seqs=8, max_num_batched_tokens=70, kv_memory=64e6), (70, 8)),
        (Limits(max_model_len=100, max_num_seqs=64, max_num_batched_tokens=20, kv_memory=64e6), (20, 20)),
    ],
)
def test_the_largest_steps_are_within_limits_and_can_be_computed(
    limits: Limits, tokens: tuple[int, int], llama: Case
) -> None:
    runner = TorchRunner(BackendContext(model_of(llama.folder), EagerConfig(device="cpu"), limits))
    longest, size = runner.info.max_model_len, runner.info.block_size
    assert limits.max_model_len is not None
    for batch, expected_tokens in zip(largest_steps(limits, longest, size), tokens, strict=True):
        assert len(batch.token_ids) == expected_tokens
        assert batch.context_lens.max() <= limits.max_model_len
        assert len(batch.context_lens) <= limits.max_num_seqs
        assert batch.slot_mapping.max() < size
        assert runner.forward(batch).shape == (min(expected_tokens, limits.logits_rows), runner.info.vocab_size)
