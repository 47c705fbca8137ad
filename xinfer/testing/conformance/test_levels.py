"""Each level of determinism that the runner declares, bit for bit."""

__all__: list[str] = []

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xinfer.engine.engine import Engine
from xinfer.engine.outputs import RequestOutput
from xinfer.engine.runner import LEVELS, ModelRunner
from xinfer.engine.types import Limits, SamplingParams, TokenLogprobs
from xinfer.testing.conformance.subject import Reported, Subject, small

pytestmark = pytest.mark.quick

LENGTHS = (40, 7, 2, 23, 60, 33)
ROOMY = Limits(max_num_batched_tokens=512, prefix_cache=False, determinism="invariant")
Outputs = dict[int, RequestOutput]


def texts_of(runner: ModelRunner) -> dict[int, list[int]]:
    """Return prompts by the number of their request."""
    rng = np.random.default_rng(5)
    return {i: rng.integers(0, runner.info.vocab_size, length).tolist() for i, length in enumerate(LENGTHS)}


def generate(runner: ModelRunner, texts: dict[int, list[int]], limits: Limits, every: int = 0) -> tuple[Outputs, Any]:
    """Return what comes of these requests, one every so many steps, and how often one was put aside or found cached."""
    engine = Engine(runner, None, limits, seed=7, logprobs_mode="raw_logits")
    shown = min(runner.info.vocab_size, 64)
    outputs: Outputs = {}
    met = {"preemptions": 0, "cached_tokens": 0}
    coming, step = list(texts.items()), 0
    while coming or engine.has_work:
        while coming and (not every or step % every == 0):
            index, text = coming.pop(0)
            params = SamplingParams(temperature=0.9 * (index % 2), max_tokens=16, logprobs=shown)
            engine.add_request(text, params, index=index)
            if every:
                break
        result = engine.step()
        outputs |= {output.index: output for output in result.finished}
        met = {name: count + getattr(result.stats, name) for name, count in met.items()}
        step += 1
    return outputs, met


def alone(runner: ModelRunner) -> Outputs:
    """Return what comes of each request with nobody else there, its prompt in one piece."""
    found: Outputs = {}
    for index, text in texts_of(runner).items():
        found |= generate(runner, {index: text}, ROOMY)[0]
    return found


def assert_same(got: Outputs, expected: Outputs, why: str) -> None:
    """Fail at the first logit that differs in a single bit."""
    for index, theirs in expected.items():
        pairs = zip(got[index].logprobs or (), theirs.logprobs or (), strict=True)
        for place, (ours, wanted) in enumerate(pairs):
            if ours != wanted:
                pytest.fail(
                    f"{why}: request {index} ({LENGTHS[index]} tokens of prompt), generated token {place}: "
                    f"{'other logits' if ours.token_id == wanted.token_id else 'another token'}\n"
                    f"  got       {_top(ours)}\n  expected  {_top(wanted)}",
                    pytrace=False,
                )
        assert got[index].token_ids == theirs.token_ids


def _top(logprobs: TokenLogprobs) -> str:
    return "  ".join(f"{token}: {value:.9g}" for token, value in logprobs.top[:5])


@pytest.fixture
def declared(request: pytest.FixtureRequest) -> ModelRunner:
    """The runner with `engine.determinism=invariant`, if it declares the level that the test is named after."""
    level = request.node.originalname.removeprefix("test_level_")
    runner: ModelRunner = request.getfixturevalue("invariant")
    if missing := {level, *(("batch",) if level == "preempt" else ())} - runner.info.levels:
        pytest.skip(f"RunnerInfo.levels does not name {', '.join(sorted(missing))} in {runner.info.dtype}")
    return Reported(runner, levels=LEVELS)  # the engine wants all five, to keep from what would change them


def test_level_rerun(subject: Subject, main_model: Path | None) -> None:
    """The same command again, in a new runner, gives the same."""
    found = []
    for _ in range(2):
        session = subject.session(main_model)
        assert "rerun" in session.runner.info.levels, "every backend must keep the level rerun"
        fast = replace(ROOMY, determinism="fast")
        found.append(generate(session.runner, texts_of(session.runner), fast, every=2)[0])
        session.close()
    assert_same(found[1], found[0], "run again")


def test_level_batch(declared: ModelRunner) -> None:
    """Whoever shares the step."""
    expected = alone(declared)
    for every in (0, 1, 3):
        together, _ = generate(declared, texts_of(declared), ROOMY, every)
        assert_same(together, expected, "among others")


def test_level_chunk(declared: ModelRunner) -> None:
    """However the prompt is cut."""
    expected = alone(declared)
    for most in (4, 7, 16):
        limits = replace(ROOMY, max_num_batched_tokens=most)
        for index, text in texts_of(declared).items():
            assert_same(generate(declared, {index: text}, limits)[0], {index: expected[index]}, f"in chunks of {most}")


def test_level_preempt(declared: ModelRunner) -> None:
    """However often it is put aside."""
    outputs, met = generate(small(declared), texts_of(declared), ROOMY)
    assert met["preemptions"] > 0
    assert_same(outputs, alone(declared), "put aside in between")


def test_level_cache(declared: ModelRunner) -> None:
    """Whether its beginning was found in the cache or computed."""
    texts = texts_of(declared)
    again = _twice(declared, texts, replace(ROOMY, prefix_cache=True))
    assert_same(again, alone(declared), "found in the cache")


def _twice(runner: ModelRunner, texts: dict[int, list[int]], limits: Limits) -> Outputs:
    """Return what comes of requests whose prompts the engine has computed before."""
    engine = Engine(runner, None, limits, seed=7, logprobs_mode="raw_logits")
    outputs: Sequence[RequestOutput] = ()
    cached = 0
    for _ in range(2):
        for index, text in texts.items():
            shown = min(runner.info.vocab_size, 64)
            params = SamplingParams(temperature=0.9 * (index % 2), max_tokens=16, logprobs=shown)
            engine.add_request(text, params, index=index)
        steps = list(engine.run())
        outputs = [output for step in steps for output in step.finished]
        cached = sum(step.stats.cached_tokens for step in steps)
    shares = runner.info.block_size <= min(LENGTHS) or "copy" in runner.info.capabilities
    assert cached > 0 or not shares
    return {output.index: output for output in outputs}
