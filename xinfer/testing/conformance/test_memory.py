"""A runner that was closed leaves nothing behind, for the next one of the process needs the memory."""

__all__: list[str] = []

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from xinfer.errors import UsageError
from xinfer.testing.conformance.plugin import fill
from xinfer.testing.conformance.subject import Models, Subject

ROUNDS = 2
LARGE: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "kv_memory": 64e6}
LEAST = 8 << 20  # bytes a round that allocators may keep for themselves


def test_memory_is_given_back_on_close(subject: Subject, models: Models, pytestconfig: pytest.Config) -> None:
    """A model of some 40 MB is made, used and closed several times, and the process does not grow by it."""
    model = _model(subject, models, pytestconfig.getoption("--model-family"))
    held = _round(subject, model)
    _round(subject, model)
    before = _resident()
    for _ in range(ROUNDS):
        _round(subject, model)
    grown = (_resident() - before) / ROUNDS
    allowed = max(LEAST, held / 2)
    if grown > allowed:
        pytest.fail(
            f"each runner that was made, used and closed left {grown / 1e6:.1f} MB behind (weights or cache take "
            f"{held / 1e6:.1f} MB): close must let go of both, and nothing else may hold the runner",
            pytrace=False,
        )


def _model(subject: Subject, models: Models, wanted: list[str]) -> Path | None:
    if not subject.computes_checkpoints:
        return None
    try:
        model = models.large()
        subject.session(model)
    except UsageError as reason:
        pytest.skip(str(reason))
    if wanted and "llama" not in wanted:
        pytest.skip("the larger model is a llama, see --model-family")
    return model


def _round(subject: Subject, model: Path | None) -> int:
    """Make a runner, fill its cache, close it, and return what weights or cache take, the lesser of both."""
    session = subject.session(model, **LARGE)
    info = session.runner.info
    fill(session.runner, longest=512)
    session.close()
    return min(filter(None, (info.resident_weight_bytes, info.kv_cache_bytes)), default=0)


def _resident() -> int:
    """Return the bytes that this process holds, on the device too."""
    gc.collect()
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return int(psutil.Process().memory_info().rss) + device
