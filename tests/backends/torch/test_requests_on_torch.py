"""Requests on the torch runners by way of the engine: what comes of them is what transformers makes of each alone.

`check` wants the same tokens, and their logprobs within `TOLERANCE`; and after each step that the blocks in use are
those that running sequences hold, at the end none.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cases import TOLERANCE, Case, compiled_runner, difference, eager_runner, expected, generated, model_of, spoil
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig, create
from xinfer.backends.torch.parallel import Leader
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.engine import Engine
from xinfer.engine.runner import ModelRunner, RunnerInfo
from xinfer.engine.types import Batch, Limits, SamplingParams
from xinfer.testing.tiny import tiny_config
from xinfer.testing.workload import Arrival, Met, Workload, check, outputs_of, workload

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST, BLOCKS = 96, 64
LIMITS = Limits(max_model_len=LONGEST, kv_memory=64e6)
# Heads that share keys; two layers that see everything and one with a window.
CONFIG = tiny_config("qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=2)
VOCAB: int = CONFIG["vocab_size"]


class Transformers(ModelRunner):
    """Has transformers compute each row from the whole text before it; of a text it keeps nothing but the tokens."""

    def __init__(self, case: Case) -> None:
        model = case.reference()
        self.info = RunnerInfo(VOCAB, LONGEST, block_size=LONGEST, num_blocks=32)
        self._tokens = np.zeros((self.info.num_blocks, LONGEST), np.int32)
        self._rows = cache(lambda text, count: expected(model, list(text))[-count:].clone())

    def forward(self, batch: Batch) -> Tensor:
        self._tokens.flat[batch.slot_mapping] = batch.token_ids
        texts = zip(batch.block_tables[:, 0], batch.context_lens, np.diff(batch.query_starts), strict=True)
        rows = [self._rows(tuple(self._tokens[block, :end].tolist()), int(count)) for block, end, count in texts]
        return torch.cat(rows)[batch.sample_at.tolist()]


class Watched(ModelRunner):
    """A runner that says it has less of a cache than it has, and whose steps are remembered.

    Attributes:
        steps: how many new tokens each sequence had.
    """

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        assert num_blocks <= runner.info.num_blocks
        self._runner, self.info = runner, replace(runner.info, num_blocks=num_blocks, kv_tokens=0)
        self.steps: list[tuple[int, ...]] = []

    def forward(self, batch: Batch) -> Tensor:
        self.steps.append(tuple(np.diff(batch.query_starts).tolist()))
        return self._runner.forward(batch)

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._runner.copy(source, target, tokens)

    def free(self, blocks: Sequence[int]) -> None:
        self._runner.free(blocks)


class Sides:
    """Makes what a workload runs on; nothing of what was in the cache before is of use to it.

    Attributes:
        compiled: tells how many graphs were made since the runner was there.
        made: runners whose steps were watched, in order.
    """

    def __init__(self, runner: ModelRunner, alone: ModelRunner, compiled: Callable[[], int]) -> None:
        self.runner, self.alone, self.compiled = runner, alone, compiled
        self.made: list[Watched] = []

    def __call__(self, limited: dict[str, Any]) -> ModelRunner:
        if not limited:
            return self.alone
        own = self.runner.runner if isinstance(self.runner, Leader) else self.runner
        assert isinstance(own, TorchRunner)
        spoil(own)
        self.made.append(Watched(self.runner, **limited))
        return self.made[-1]

    @property
    def steps(self) -> list[tuple[int, ...]]:
        return [step for runner in self.made for step in runner.steps]


transformers = cache(Transformers)

FOLLOWER = """
import sys
from pathlib import Path
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig, create
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model

model = Model(sys.argv[1], lambda: Path(sys.argv[1]), xinfer_model_families(), dtype="float32")
limits = Limits(max_model_len=int(sys.argv[2]), kv_memory=64e6)
create(BackendContext(model, EagerConfig(device="cpu", threads=1, kv_dtype=sys.argv[3] or None), limits, 2))
"""


def two_processes(case: Case, kv_dtype: str | None = None) -> ModelRunner:
    """Return the runner of the first of two processes, the other of which is started, as by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        both = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (both | {"TORCHELASTIC_RUN_ID": "none", "RANK": 0}).items():
            patch.setenv(name, str(value))
        command = [sys.executable, "-c", FOLLOWER, str(case.folder), str(LONGEST), kv_dtype or ""]
        subprocess.Popen(command, env=os.environ | {"RANK": "1"})
        return create(BackendContext(model_of(case.folder), EagerConfig(device="cpu", kv_dtype=kv_dtype), LIMITS, 2))


def invariant_runner(case: Case, kv_dtype: str) -> ModelRunner:
    return eager_runner(model_of(case.folder), replace(LIMITS, determinism="invariant"), kv_dtype)


# A runner, and what computes the same for each request alone.
RUNNERS: dict[str, tuple[Callable[[Case], ModelRunner], Callable[[Case], ModelRunner]]] = {
    "eager": (lambda case: eager_runner(model_of(case.folder), LIMITS), transformers),
    "streamed": (lambda case: eager_runner(model_of(case.folder, stream_layers=2), LIMITS), transformers),
    "two processes": (two_processes, transformers),
    "compile": (lambda case: compiled_runner(model_of(case.folder), LIMITS), transformers),
    # Transformers keeps no codes. Whether a number is rounded up or down may hang on its last digit, so that only rows
    # that are alike bit for bit get the same tokens; test_int8_cache_on_torch.py compares them with transformers'.
    "int8": (lambda case: invariant_runner(case, "int8"), lambda case: invariant_runner(case, "int8")),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("requests"), CONFIG)


@pytest.fixture(scope="module", params=RUNNERS)
def ready(request: pytest.FixtureRequest, case: Case) -> Iterator[tuple[ModelRunner, ModelRunner, Callable[[], int]]]:
    """Both sides, and what counts graphs made since, ahead of time or in a call.

    It counts over all tests: what has reached torch's limit is compiled no more, which a later count would not tell.
    """
    make, make_alone = RUNNERS[request.param]
    runner, alone = make(case), make_alone(case)
    made: list[Any] = []
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "aoti_compile_and_package", lambda *args, **kwargs: made.append(args))
        yield runner, alone, lambda: len(made) + counted["unique_graphs"] - before
    runner.close()


@pytest.fixture
def sides(ready: tuple[ModelRunner, ModelRunner, Callable[[], int]]) -> Sides:
    return Sides(*ready)


def tokens(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist())


def arrivals(prompts: list[tuple[int, ...]], every: int = 0, **params: Any) -> list[Arrival]:
    """Return requests for these prompts, one every so many steps: greedy and sampled in turn, unless told otherwise."""
    asked = [
        SamplingParams(**{"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 12 + i, "logprobs": 0} | params)
        for i in range(len(prompts))
    ]
    return [Arrival(i * every, prompt, asked[i], 0, None) for i, prompt in enumerate(prompts)]


def work(coming: list[Arrival], blocks: int = BLOCKS, **limits: Any) -> Workload:
    return Workload(0, Limits(**limits), {"num_blocks": blocks}, tuple(coming), speculates=False)


def computed(coming: list[Arrival]) -> int:
    """Return how many tokens must be computed for them: all but each one's last."""
    return sum(len(each.prompt) + (each.params.max_tokens or 0) - 1 for each in coming)


PROMPTS = [tokens(length) for length in (1, 40, 7, 2, 23, 60, 16, 33, 64, 12)]


def test_what_is_compared_with_generates_what_transformers_generates(case: Case) -> None:
    engine = Engine(transformers(case), None, LIMITS)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    said = {output.index: list(output.token_ids) for step in engine.run() for output in step.finished}
    reference = case.reference()
    assert [said[i] for i in range(len(PROMPTS))] == [generated(reference, list(prompt), 20) for prompt in PROMPTS]


@pytest.mark.parametrize("every", [0, 1, 3])
def test_requests_that_come_while_others_run_get_the_tokens_that_they_get_alone(sides: Sides, every: int) -> None:
    check(work(arrivals(PROMPTS, every)), sides, TOLERANCE)
    assert max(map(len, sides.steps)) >= 6
    assert len({len(step) for step in sides.steps}) >= 3


@pytest.mark.parametrize("most", [1, 2, 5, 16, 17])
def test_it_does_not_matter_into_which_chunks_prompts_are_cut(sides: Sides, most: int) -> None:
    coming = arrivals(PROMPTS, 2)
    check(work(coming, max_num_batched_tokens=most), sides, TOLERANCE)
    assert max(map(sum, sides.steps)) == most
    assert sum(map(sum, sides.steps)) == computed(coming)


@pytest.mark.parametrize("step", [0, 2, 9])
def test_a_request_that_is_given_up_leaves_others_alone_and_gives_its_blocks_back(sides: Sides, step: int) -> None:
    """While it waits, within its prompt, or while it generates; the others have to wait for its blocks."""
    given_up, *others = arrivals([tokens(60), *PROMPTS])
    coming = [replace(given_up, aborted=step), *others]
    assert check(work(coming, blocks=8, max_num_batched_tokens=16), sides, TOLERANCE).aborted == 1
    assert sides.steps[:3] == [(16,), (16,), (16,)] or step < 3


def test_requests_that_memory_puts_aside_go_on_as_if_nothing_had_been(sides: Sides) -> None:
    for cached in (False, True):
        met = check(work(arrivals(PROMPTS, 1, max_tokens=30), blocks=8, prefix_cache=cached), sides, TOLERANCE)
        assert met.preemptions >= 3


def test_a_beginning_that_is_found_in_the_cache_changes_no_token(sides: Sides) -> None:
    beginning = tokens(48)
    prompts = [beginning[:shared] + tokens(own, shared) for shared in (48, 32, 47, 16) for own in (1, 5, 17)]
    other = beginning[16:32] + beginning[:16] + tokens(5)  # the same chunks, yet another beginning
    coming = arrivals([*prompts, beginning, other, beginning], 2)
    met = check(work(coming, max_num_batched_tokens=32), sides, TOLERANCE)
    assert met.cached_tokens >= 16 * len(prompts)
    assert sum(map(sum, sides.steps)) == computed(coming) - met.cached_tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_samples_of_one_prompt_go_their_own_ways_from_a_block_that_they_share(sides: Sides, length: int) -> None:
    coming = arrivals([tokens(length), tokens(length), tokens(9)], 3, n=2, temperature=1.0)
    wanted = work(coming, prefix_cache=length > 16)
    met, said = check(wanted, sides, TOLERANCE), outputs_of(wanted, sides)
    assert all(said[i, 0].token_ids != said[i, 1].token_ids for i in range(len(coming)))
    assert met.copies >= 1 + 2 * (length % 16 > 0)
    assert (met.cached_tokens > 0) == (length > 16)


def test_an_engine_is_not_disturbed_by_what_the_one_before_it_left_in_the_cache(sides: Sides) -> None:
    earlier, later = (arrivals([tokens(length, seed) for length in (40, 17, 64)]) for seed in (1, 2))
    check(work(earlier), sides, TOLERANCE)
    again = sides.made[0]
    assert check(work(later), lambda limited: again if limited else sides.alone, TOLERANCE).cached_tokens == 0


def rows_of(runner: ModelRunner, prompts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the three tokens that each prompt brings, and the logits [3, vocabulary] at their places."""
    engine = Engine(runner, None, Limits(prefix_cache=False), logprobs_mode="raw_logits")
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=3, logprobs=VOCAB))
    outputs = {each.index: each for step in engine.run() for each in step.finished}
    tops = [[sorted(each.top) for each in outputs[i].logprobs or ()] for i in range(len(prompts))]
    return [(outputs[i].token_ids, torch.tensor(top)[..., 1]) for i, top in enumerate(tops)]


@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_one_to_twelve_sequences_get_the_logits_that_each_gets_alone(sides: Sides, length: int) -> None:
    """Case N04: sizes at which a compiled step may take another way."""
    prompts = [tokens(length, seed) for seed in range(12)]
    theirs = [rows_of(sides.alone, [prompt])[0] for prompt in prompts]
    for count in range(1, 13):
        ours = rows_of(sides({"num_blocks": BLOCKS}), prompts[:count])
        assert sides.made[-1].steps == [(length,) * count, (1,) * count, (1,) * count]
        assert [said for said, _ in ours] == [said for said, _ in theirs[:count]]
        assert max(difference(a, b) for (_, a), (_, b) in zip(ours, theirs[:count], strict=True)) <= TOLERANCE
    assert sides.compiled() == 0


def drawn(number: int) -> Workload:
    """Return random workload `number`, with a cache of as little as one sequence."""
    work = workload(number, VOCAB, LONGEST)
    return replace(work, limits=replace(work.limits, determinism="fast"), cache={"num_blocks": 6 + 3 * (number % 4)})


def test_hundreds_of_steps_of_any_shape_compile_nothing_and_change_no_token(sides: Sides) -> None:
    met = [check(drawn(number), sides, TOLERANCE) for number in range(16)]
    assert sides.compiled() == 0
    assert all(any(getattr(each, name) for each in met) for name in Met.__dataclass_fields__)
    shapes = [(max(step) > 1, min(step) == 1) for step in sides.steps]
    assert len(shapes) >= 500
    assert min(shapes.count(kind) for kind in ((False, True), (True, False), (True, True))) >= 50
    assert len(set(sides.steps)) >= 100
