"""The roofline is bytes over bandwidth, compared with the time that decode steps took."""

import pytest

from xinfer import hardware
from xinfer.engine.engine import Engine
from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Limits, SamplingParams
from xinfer.hardware import Speed
from xinfer.tasks.roofline import Roofline
from xinfer.testing.fake import FakeRunner


@pytest.fixture
def steps():
    engine = Engine(FakeRunner(), None, Limits())
    for length in (3, 5):
        engine.add_request([1] * length, SamplingParams(max_tokens=4, ignore_eos=True))
    return list(engine.run())


def info(**changes) -> RunnerInfo:
    return RunnerInfo(vocab_size=9, max_model_len=9, block_size=9, num_blocks=9, **changes)


def test_a_step_reads_the_weights_once_and_the_cache_of_every_sequence(steps, monkeypatch):
    monkeypatch.setattr(hardware, "speed", lambda device, cache: Speed(2000.0, 1.0, 1.0, 1.0, "2026-01-01"))
    roofline = Roofline()
    for step in steps:
        roofline.add(step)
    figures = roofline.figures(info(step_read_bytes=1000, kv_token_bytes=10))
    # Three decode steps after the prefill; the first reads 3 + 1 and 5 + 1 tokens, each later one two more.
    read = 3 * 1000 + 10 * (10 + 12 + 14)
    assert figures["read_bytes_per_step"] == read / 3
    assert figures["floor_ms_per_step"] == pytest.approx(read / 2000 * 1000 / 3)
    took = sum(step.stats.step_ms for step in steps[1:])
    assert figures["share"] == pytest.approx(read / 2000 * 1000 / took)


def test_there_is_none_where_nothing_is_known(steps):
    roofline = Roofline()
    assert roofline.figures(info(step_read_bytes=5)) is None
    for step in steps:
        roofline.add(step)
    assert roofline.figures(info()) is None
