"""Random workloads: what comes of a request is what comes of it alone, whatever happens around it.

A failure names its workload; `pytest tests/engine/test_fuzz.py --workload N` replays it. `pytest -m slow
tests/engine/test_fuzz.py -s` runs 5,000 of them on `FakeRunner` and 200 on a tiny model, and prints what they met.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine import schedule
from xinfer.engine.flight import Flight
from xinfer.engine.kv_cache import BlockPool
from xinfer.engine.runner import ModelRunner, RunnerInfo
from xinfer.engine.scheduler import Scheduler
from xinfer.engine.types import Limits, Sequence, State
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.fake import FakeRunner
from xinfer.testing.tiny import tiny_config, write_folder
from xinfer.testing.workload import Met, check, workload

VOCAB, LONGEST = 260, 96
REAL = (66, 291)  # short workloads that meet preemption and the cache
CAPABILITIES = (
    {"copy", "free"},
    {"copy", "free"},
    {"free"},
    {"copy", "free", "decode_differs"},
    {"decode_differs"},
)


def echo(context: list[int]) -> int | None:
    """A model that mostly says what it said three tokens ago, so that something can be guessed."""
    last = [token % VOCAB for token in context[-3:]]
    return last[0] if len(last) == 3 and sum(last) % 4 else None


def fake(number: int):
    """What makes the runners of a workload: of every kind in turn."""

    def make(cache):
        return FakeRunner(
            vocab_size=VOCAB,
            max_model_len=LONGEST,
            capabilities=frozenset(CAPABILITIES[number % len(CAPABILITIES)]),
            script=echo if number % 3 == 0 else None,
            **cache,
        )

    return make


def on_fakes_ahead(numbers: Iterable[int]) -> tuple[list[Met], list[int]]:
    """What workloads met on runners that run ahead, and in how many steps these did; alone no request does."""
    made = []

    def make(cache, number):
        runner = fake(number)(cache)
        if cache:
            runner.info = replace(runner.info, capabilities=runner.info.capabilities | {"ahead"})
            made.append(runner)
        return runner

    met = [check(workload(number, VOCAB, LONGEST, plain=True), partial(make, number=number)) for number in numbers]
    return met, [runner.steps_ahead for runner in made]


def on_fakes(numbers: Iterable[int]) -> list[Met]:
    return [check(workload(number, VOCAB, LONGEST), fake(number)) for number in numbers]


def told(met: list[Met]) -> dict[str, float]:
    """The share of workloads that met each thing."""
    return {name: sum(getattr(m, name) > 0 for m in met) / len(met) for name in Met.__dataclass_fields__}


def test_some_workloads(request):
    only = request.config.getoption("--workload")
    shares = told(on_fakes(range(120) if only is None else [only]))
    if only is None:
        assert shares["preemptions"] >= 0.3
        assert shares["cached_tokens"] >= 0.3
        assert min(shares.values()) > 0


def test_some_workloads_whose_steps_run_ahead(request):
    only = request.config.getoption("--workload")
    met, steps = on_fakes_ahead(range(60) if only is None else [only])
    if only is None:
        assert sum(count > 0 for count in steps) >= 57
        assert sum(steps) > 1000
        assert min(told(met)[name] for name in ("preemptions", "cached_tokens", "copies", "aborted")) > 0


@pytest.mark.slow
def test_five_thousand_workloads_whose_steps_run_ahead(capsys):
    met, steps = on_fakes_ahead(range(5000))
    with capsys.disabled():
        print(
            f"\n{len(met)} workloads on FakeRunner, {sum(steps)} of their steps ahead, "
            f"share of those that met: {told(met)}"
        )
    assert told(met)["preemptions"] >= 0.3


@pytest.mark.slow
def test_five_thousand_workloads(capsys):
    met = on_fakes(range(5000))
    with capsys.disabled():
        print(f"\n{len(met)} workloads on FakeRunner, share of those that met: {told(met)}")
    assert told(met)["preemptions"] >= 0.3
    assert told(met)["cached_tokens"] >= 0.3


# A real model


class Narrow(ModelRunner):
    """A runner that says it has less of a cache than it has."""

    def __init__(self, runner: TorchRunner, cache: dict[str, int]) -> None:
        self._runner, info = runner, runner.info
        blocks = -(-LONGEST // info.block_size) * cache["tightness"] if cache else info.num_blocks
        self.info = RunnerInfo(
            vocab_size=info.vocab_size,
            max_model_len=LONGEST,
            block_size=info.block_size,
            num_blocks=min(blocks, info.num_blocks),
            levels=info.levels,
            capabilities=info.capabilities,
        )

    def forward(self, batch):
        return self._runner.forward(batch)

    def copy(self, source, target, tokens):
        self._runner.copy(source, target, tokens)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tiny(request, tmp_path_factory) -> TorchRunner:
    path: Path = write_folder(tmp_path_factory.mktemp("tiny"), tiny_config("qwen3"), seed=0)
    model = Model(str(path), lambda: path, xinfer_model_families(), dtype=request.param)
    return TorchRunner(BackendContext(model, EagerConfig(device="cpu"), Limits(determinism="invariant")))


def on_tiny(runner: TorchRunner, numbers: Iterable[int]) -> list[Met]:
    return [
        check(
            workload(number, runner.info.vocab_size, LONGEST),
            lambda cache, number=number: Narrow(runner, {"tightness": 1 + (number % 4 == 0)} if cache else {}),
        )
        for number in numbers
    ]


def test_some_workloads_on_a_tiny_model(tiny):
    shares = told(on_tiny(tiny, range(12)))
    assert shares["preemptions"] > 0
    assert shares["cached_tokens"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_workload_on_the_real_model(smollm2_path: Path, dtype: str):
    """Real weights tell what random ones may hide: in bfloat16 most differences of order vanish in rounding."""
    torch.set_num_threads(2)
    model = Model(str(smollm2_path), lambda: smollm2_path, xinfer_model_families(), dtype=dtype)
    runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), Limits(determinism="invariant")))
    met = on_tiny(runner, REAL)
    torch.set_num_threads(1)
    assert min(told(met)[name] for name in ("preemptions", "cached_tokens")) > 0


@pytest.mark.slow
def test_two_hundred_workloads_on_a_tiny_model(tiny, capsys):
    met = on_tiny(tiny, range(200))
    with capsys.disabled():
        print(f"\n{len(met)} workloads on a tiny model in {tiny.info.dtype}, share of those that met: {told(met)}")
    assert told(met)["preemptions"] >= 0.3
    assert told(met)["cached_tokens"] >= 0.3


# Faults, planted to see that the workloads find them


def no_copy_before_writing(monkeypatch):
    def grow(self, sequence, tokens):
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing > self.num_free:
            return False
        sequence.blocks += [self._take() for _ in range(missing)]
        return True

    monkeypatch.setattr(BlockPool, "grow", grow)


def a_fork_holds_nothing(monkeypatch):
    def fork(self, source, target, least=1):
        target.num_computed, target.blocks = source.num_computed, list(source.blocks)

    monkeypatch.setattr(BlockPool, "fork", fork)


def a_hash_of_the_chunk_alone(monkeypatch):
    monkeypatch.setattr(BlockPool, "_hash", lambda self, sequence, place: self._bytes(sequence, place))


def a_chunk_known_too_early(monkeypatch):
    right = BlockPool.register

    def register(self, sequence, most=None):
        sequence.num_computed += 1
        right(self, sequence, most)
        sequence.num_computed -= 1

    monkeypatch.setattr(BlockPool, "register", register)


def an_evicted_block_is_still_known(monkeypatch):
    def forget(self, block):
        self._known.pop(block)
        self._fill(block, 0)

    monkeypatch.setattr(BlockPool, "_forget", forget)


def copies_are_forgotten(monkeypatch):
    right = BlockPool._copy

    def copy(self, source, target, tokens):
        right(self, source, target, tokens)
        self.copies.pop()

    monkeypatch.setattr(BlockPool, "_copy", copy)


def blocks_leak(monkeypatch):
    right = BlockPool.release

    def release(self, sequence):
        if len(sequence.blocks) > 3:
            sequence.blocks.pop()
        return right(self, sequence)

    monkeypatch.setattr(BlockPool, "release", release)


def what_is_put_aside_keeps_its_count(monkeypatch):
    right = Scheduler._preempt

    def preempt(self, plan, victim):
        computed = victim.num_computed
        right(self, plan, victim)
        victim.num_computed = max(0, computed - 20)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    attach = BlockPool._attach

    def keep(self, sequence, shared, source):
        computed = sequence.num_computed
        done = attach(self, sequence, shared, source)
        sequence.num_computed = max(sequence.num_computed, computed)
        return done

    monkeypatch.setattr(BlockPool, "_attach", keep)


def what_is_put_aside_is_forgotten(monkeypatch):
    right = Scheduler._push

    def push(self, sequence):
        if sequence.state is not State.PREEMPTED:
            right(self, sequence)

    monkeypatch.setattr(Scheduler, "_push", push)


def rejected_drafts_count_as_computed(monkeypatch):
    right = Scheduler.computed

    def computed(self, sequence, count):
        right(self, sequence, count + len(sequence.draft) if count == 1 else count)

    monkeypatch.setattr(Scheduler, "computed", computed)


def everything_may_come_from_the_cache(monkeypatch):
    monkeypatch.setattr(Scheduler, "_reusable", lambda self, sequence: len(sequence.token_ids))


def logits_rows_are_taken_in_another_order(monkeypatch):
    right = schedule.Schedule.lay_out

    def lay_out(self, pool):
        right(self, pool)
        if len(self.rows) > 2:
            self.rows[-2:] = self.rows[:-3:-1]

    monkeypatch.setattr(schedule.Schedule, "lay_out", lay_out)


def an_unseen_token_is_taken_for_another(monkeypatch):
    right = Flight.name_tokens

    def name_tokens(self):
        right(self)
        unseen = [s for s in self.plan.sampled if s.token_ids[-1] < 0]
        for sequence, other in zip(unseen, [s.token_ids[-1] for s in unseen][::-1], strict=True):
            sequence.token_ids[-1] = other

    monkeypatch.setattr(Flight, "name_tokens", name_tokens)


def what_has_all_its_tokens_goes_on(monkeypatch):
    monkeypatch.setattr(Sequence, "ending", False)


@pytest.mark.parametrize("fault", [an_unseen_token_is_taken_for_another, what_has_all_its_tokens_goes_on])
def test_a_planted_fault_of_running_ahead_is_found(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        on_fakes_ahead(range(120))


FAULTS = [
    no_copy_before_writing,
    a_fork_holds_nothing,
    a_hash_of_the_chunk_alone,
    a_chunk_known_too_early,
    an_evicted_block_is_still_known,
    copies_are_forgotten,
    blocks_leak,
    what_is_put_aside_keeps_its_count,
    what_is_put_aside_is_forgotten,
    rejected_drafts_count_as_computed,
    everything_may_come_from_the_cache,
    logits_rows_are_taken_in_another_order,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        on_fakes(range(120))
