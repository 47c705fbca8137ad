"""Processes that compute one model find one another, or say who is missing; one that goes takes no other with it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xinfer.backends.torch import parallel
from xinfer.backends.torch.parallel import Ranks
from xinfer.errors import XinferError
from xinfer.testing.tiny import tiny_config, write_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback device")

CPU = torch.device("cpu")


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def as_process(port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Make this process one of several, which are given little time to come; return the environment of the others."""

    def become(rank: int, count: int = 2) -> dict[str, str]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        for name, value in (place | {"TORCHELASTIC_RUN_ID": "none", "RANK": rank, "LOCAL_RANK": rank}).items():
            monkeypatch.setenv(name, str(value))
        return dict(os.environ)

    monkeypatch.setattr(parallel, "_START", timedelta(seconds=0.2))
    return become


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_one_that_is_alone_says_for_whom_it_has_waited_and_how_to_start_them(
    rank: int, missing: int, as_process: Callable[..., object]
) -> None:
    as_process(rank)
    said = rf"process {rank} of parallel.tensor=2 has waited \d+ s for process {missing}: .*torchrun --nproc-per-node 2"
    with pytest.raises(XinferError, match=said):
        Ranks(CPU)


def test_of_several_those_are_named_that_did_not_come(as_process: Callable[..., object], port: int) -> None:
    as_process(0, 4)
    there = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    there.add("process 2", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(XinferError, match=r"for process 1, 3: "):
            Ranks(CPU)


def test_a_port_that_is_taken_is_named(as_process: Callable[..., object], port: int) -> None:
    as_process(0)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(XinferError, match=f"at 127.0.0.1:{port} .*anew"):
        Ranks(CPU)


def test_the_command_ends_where_others_do_not_come(
    as_process: Callable[..., object], say: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    write_folder(tmp_path / "m", tiny_config("llama", num_attention_heads=4, num_key_value_heads=2), seed=0)
    as_process(0)
    code, out, error = say("--model", "m", "--prompt", "a", "parallel.tensor=2", "backend.device=cpu", "record=none")
    assert (code, out) == (3, "")
    assert error.startswith("xinfer: process 0 of parallel.tensor=2 has waited") and error.count("\n") == 1


GOES = """
import os, sys
import torch
from xinfer.backends.torch.parallel import Ranks
from xinfer.errors import ConfigError
ranks = Ranks(torch.device("cpu"))
if sys.argv[1] == "refuses":
    raise ConfigError("this one has had a look at what it loads")
os._exit(1)
"""


@pytest.fixture
def joined(
    as_process: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Ranks]]:
    """Return what makes this process one of two, of which the other ends once it has joined."""
    started: list[subprocess.Popen[bytes]] = []

    def join(rank: int, how: str) -> Ranks:
        monkeypatch.setattr(parallel, "_START", timedelta(minutes=2))
        other = as_process(rank) | {"RANK": str(1 - rank)}
        started.append(subprocess.Popen([sys.executable, "-c", GOES, how], env=other, stderr=subprocess.DEVNULL))
        return Ranks(CPU)

    yield join
    for each in started:
        each.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "how", "loads"), [(0, "dies", True), (1, "refuses", False)])
def test_one_that_ends_while_it_loads_ends_the_other(
    rank: int, how: str, loads: bool, joined: Callable[..., Ranks]
) -> None:
    ranks = joined(rank, how)
    with pytest.raises(XinferError, match=f"process {rank} of parallel.tensor=2 ends, since another one has ended"):
        ranks.in_turn(lambda: 1) if loads else ranks.least(3)


def test_once_all_are_there_one_may_be_idle_for_as_long_as_it_likes(joined: Callable[..., Ranks]) -> None:
    joined(0, "dies")
    backend = dist.distributed_c10d._get_default_group()._get_backend(CPU)
    assert backend.options._timeout > timedelta(days=300)  # type: ignore[attr-defined]
