"""How fast it goes, in a figure that is printed and compared with nothing."""

__all__: list[str] = []

from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest

from xinfer.engine.engine import Engine
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import SamplingParams
from xinfer.testing.conformance.subject import Subject

pytestmark = pytest.mark.quick

SEQUENCES, PROMPT, GENERATED = 8, 48, 32


def test_throughput_is_reported(subject: Subject, runner: ModelRunner, report: Callable[[str], None]) -> None:
    """Eight requests together, on the same tiny model: of use beside the same figure of another backend."""
    engine = Engine(runner, None, subject.limits(prefix_cache=False), seed=7)
    rng = np.random.default_rng(0)
    for _ in range(SEQUENCES):
        prompt = rng.integers(0, runner.info.vocab_size, PROMPT).tolist()
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=GENERATED))
    seconds, tokens = [0.0, 0.0], [0, 0]
    while engine.has_work:
        started = perf_counter()
        stats = engine.step().stats
        decodes = not stats.prefill_tokens
        seconds[decodes] += perf_counter() - started
        tokens[decodes] += stats.decode_tokens if decodes else stats.prefill_tokens
    assert tokens == [SEQUENCES * PROMPT, SEQUENCES * (GENERATED - 1)]
    prefill, decode = (count / took for count, took in zip(tokens, seconds, strict=True))
    report(
        f"{subject.backend.name}, {SEQUENCES} sequences, in {runner.info.dtype} on {runner.info.device}: "
        f"prefill {prefill:,.0f} tokens/s, decode {decode:,.0f} tokens/s"
    )
