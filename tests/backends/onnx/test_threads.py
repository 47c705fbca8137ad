"""torch's threads beside those of ONNX Runtime."""

import threading
from pathlib import Path

import pytest
import torch

from xinfer import Limits
from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig
from xinfer.backends.onnx.runner import OnnxRunner
from xinfer.backends.onnx.threads import OneThread
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.stepper import Stepper


@pytest.fixture(autouse=True)
def three_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(usual)


def seen_elsewhere() -> int:
    """Threads that torch takes in a thread that has only begun."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_only_who_asks_is_limited_and_gets_back_what_it_had() -> None:
    one = OneThread()
    one.take()
    one.take()
    assert torch.get_num_threads() == 1
    assert seen_elsewhere() == 3
    one.give_back()
    assert torch.get_num_threads() == 3
    one.give_back()
    assert torch.get_num_threads() == 3


def test_another_thread_is_limited_by_itself() -> None:
    one, seen = OneThread(), []

    def ask() -> None:
        one.take()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [1]
    assert torch.get_num_threads() == 3 == seen_elsewhere()
    one.give_back()  # of nothing here
    assert torch.get_num_threads() == 3


def test_a_runner_limits_who_steps_it_until_it_is_closed(tiny_llama: Path) -> None:
    model = Model("x", lambda: tiny_llama, xinfer_model_families())
    limits = Limits(max_model_len=32, max_num_seqs=1, kv_memory=64e6)
    runner = OnnxRunner(BackendContext(model, OnnxConfig(device="cpu", threads=1), limits))
    Stepper(runner).greedy([1, 2, 3], [3], 2)
    assert torch.get_num_threads() == 1
    assert seen_elsewhere() == 3
    runner.close()
    assert torch.get_num_threads() == 3
