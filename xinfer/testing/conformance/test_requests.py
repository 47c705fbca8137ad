"""What the engine makes of requests on this runner is what it makes of each alone."""

__all__: list[str] = []

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Limits, SamplingParams
from xinfer.testing.conformance.subject import Subject, small
from xinfer.testing.workload import Arrival, Met, Workload, check, workload

pytestmark = pytest.mark.quick

LENGTHS = (1, 40, 7, 2, 23, 60, 16, 33)


class Requests:
    """Runs requests together and each alone; a difference is an `AssertionError` that names the request."""

    def __init__(self, subject: Subject, runner: ModelRunner) -> None:
        tolerance = subject.tolerance_of(runner)
        if not tolerance.each:
            pytest.skip("where logits are rounded a token may change with who shares its step, if no level is declared")
        self.runner, self.tolerance = runner, 10 * tolerance.share

    def text(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Return random token ids."""
        vocabulary = self.runner.info.vocab_size
        return tuple(np.random.default_rng([length, seed]).integers(0, vocabulary, length).tolist())

    def arrivals(self, every: int = 0, **params: Any) -> list[Arrival]:
        """Return requests, one every so many steps, greedy and sampled in turn."""
        return [
            Arrival(i * every, self.text(length), self.params(i, **params), 0, None) for i, length in enumerate(LENGTHS)
        ]

    def params(self, index: int, **params: Any) -> SamplingParams:
        """Return what request `index` asks for."""
        usual = {"temperature": 0.9 * (index % 2), "seed": index, "max_tokens": 8 + index, "logprobs": 0}
        return SamplingParams(**{**usual, **params})

    def check(self, coming: list[Arrival], runner: ModelRunner | None = None, **limits: Any) -> Met:
        """Run them, and return what they met."""
        made = runner or self.runner
        work = Workload(0, Limits(**limits), {"": 0}, tuple(coming), speculates=False)
        return check(work, lambda limited: made if limited else self.runner, self.tolerance)


@pytest.fixture
def requests(subject: Subject, runner: ModelRunner) -> Requests:
    """What runs them."""
    return Requests(subject, runner)


@pytest.mark.parametrize("every", [0, 2])
def test_requests_get_the_tokens_that_they_get_alone(requests: Requests, every: int) -> None:
    """Whether they come at once or while others run."""
    requests.check(requests.arrivals(every))


@pytest.mark.parametrize("most", [1, 5, 16])
def test_the_engine_may_cut_prompts_into_chunks(requests: Requests, most: int) -> None:
    """`engine.max_num_batched_tokens` says how long they are at most."""
    requests.check(requests.arrivals(1), max_num_batched_tokens=most)


@pytest.mark.parametrize("step", [0, 2, 6])
def test_an_aborted_request_leaves_others_alone_and_gives_its_blocks_back(requests: Requests, step: int) -> None:
    """While it waits, within its prompt, or while it generates."""
    first, *others = requests.arrivals()
    given_up = replace(first, prompt=requests.text(60, seed=1), params=requests.params(0, max_tokens=30), aborted=step)
    met = requests.check([given_up, *others], small(requests.runner), max_num_batched_tokens=16)
    assert met.aborted == 1


def test_requests_that_memory_puts_aside_go_on_as_if_nothing_had_been(requests: Requests) -> None:
    """They are computed again, into other blocks."""
    met = requests.check(requests.arrivals(1, max_tokens=30), small(requests.runner))
    assert met.preemptions > 0


def test_a_beginning_that_is_found_in_the_cache_changes_nothing(requests: Requests) -> None:
    """Blocks that others have computed are shared, or copied."""
    beginning = requests.text(48)
    texts = [beginning[:shared] + requests.text(own, shared) for shared in (48, 32, 47) for own in (1, 17)]
    coming = [Arrival(3 * i, text, requests.params(i), 0, None) for i, text in enumerate([*texts, beginning])]
    met = requests.check(coming)
    shares = requests.runner.info.block_size <= 48 or "copy" in requests.runner.info.capabilities
    assert met.cached_tokens > 0 or not shares


def test_samples_share_their_prompt(requests: Requests) -> None:
    """`n` samples hold the prompt's blocks together, and part where they part."""
    requests.check(requests.arrivals(n=3, temperature=1.0, max_tokens=8)[:3])


@pytest.mark.parametrize("number", range(6))
def test_random_workloads(requests: Requests, number: int) -> None:
    """Requests that come, share prefixes, guess, are put aside and aborted, in any mixture."""
    work = workload(number, requests.runner.info.vocab_size)
    work = replace(work, limits=replace(work.limits, determinism="fast"), cache={"": 0})
    tight = small(requests.runner)
    check(work, lambda limited: tight if limited else requests.runner, requests.tolerance)
