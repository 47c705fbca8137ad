"""Tensor parallelism: several processes compute one model, each its heads and its columns.

The first one has the engine. Whatever it asks of its runner it tells the others, which do the same and so meet it in
every sum; they know nothing of requests, and end when it does.
"""

__all__ = ["Gathered", "Leader", "Ranks", "Summed", "led"]

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, library, nn
from torch._C._distributed_c10d import Store, TCPStore

from xinfer import processes
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch
from xinfer.errors import XinferError
from xinfer.models.split import Share

T = TypeVar("T")

_START = timedelta(minutes=5)  # in which all processes are there: whoever starts them by hand takes a moment
_FOREVER = timedelta(days=365)  # others wait for as long as nobody asks for anything; who ends is heard of at once
_CLOSE, _FORWARD, _COPY = range(3)
_FIELDS = [each.name for each in fields(Batch) if each.name != "drawn"]
_HEAD = 2 + len(_FIELDS)  # numbers that are told at once


class Ranks:
    """The processes that compute one model; one of them that has ended is a `XinferError` in all others.

    Attributes:
        rank: which one this is; 0 has the engine.
        count: of how many.
    """

    def __init__(self, device: torch.device) -> None:
        global _here
        self.rank, self.count = processes.rank(), processes.count()
        self._lost: XinferError | None = None
        self._name = f"process {self.rank} of parallel.tensor={self.count}"
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        place: dict[str, Any] = {"store": self._assembled(), "rank": self.rank, "world_size": self.count}
        self._meet(dist.init_process_group, kind, timeout=_START, **place)
        dist.distributed_c10d._set_pg_timeout(_FOREVER)
        _here = self

    def __str__(self) -> str:
        return f"{self.count} processes compute the model together; sizes are those of the first one's share"

    def _assembled(self) -> Store:
        """Return what processes find one another by, once all are there."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun, else by the first process
        if self.rank and not kept:  # torch would say in pages of its own that nobody answers
            self._await(lambda: [] if _answers(host, port) else [0])
        try:
            store = TCPStore(host, port, None, not self.rank and not kept, _START, wait_for_workers=False)
        except RuntimeError as error:
            raise XinferError(
                f"{self._name} can't meet others at {host}:{port} ({_first_line(error)}): start all anew, with another "
                "port (torchrun --master-port) if something else has this one"
            ) from error
        if self._meet(store.add, f"process {self.rank}", 1) > 1:
            raise XinferError(
                f"{self._name} has had a model already, with which the other processes end: of those that torchrun "
                "starts a program gets one"
            )
        self._await(lambda: [each for each in range(self.count) if not self._meet(store.check, [f"process {each}"])])
        return store

    def _await(self, missing: Callable[[], list[int]]) -> None:
        """Wait until nobody is missing; whoever does not come in time is named by a `XinferError`."""
        started = monotonic()
        while absent := missing():
            if (waited := monotonic() - started) > _START.total_seconds():
                raise XinferError(
                    f"{self._name} has waited {waited:.0f} s for process {', '.join(map(str, absent))}: if it has "
                    f"ended, it has said why; else start all {self.count} at once, as `torchrun --nproc-per-node "
                    f"{self.count} -m xinfer parallel.tensor={self.count}` does"
                )
            sleep(0.01)

    def _meet(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Do something that all processes do."""
        try:
            return call(*arguments, **named)
        except RuntimeError as error:
            raise XinferError(
                f"{self._name} ends, since another one has ended: if it could, it has said why ({_first_line(error)})"
            ) from error

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all processes."""
        summed = x.clone(memory_format=torch.contiguous_format)
        self._keep(dist.all_reduce, summed)
        return summed

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """Return [n, sum of widths] of all processes' [n, width] in the first; others get numbers of no meaning."""
        padded = nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        self._keep(dist.gather, padded, parts)
        if parts is None:
            return x.new_empty(x.shape[0], sum(widths))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def _keep(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Do what all processes do within a step, and keep an error for its end: a graph would make text of it."""
        if self._lost is None:
            try:
                self._meet(call, *arguments)
            except XinferError as error:
                self._lost = error

    def check(self) -> None:
        """Raise what has ended the meetings of a step; its numbers are of no meaning then."""
        if self._lost is not None:
            raise self._lost

    def least(self, number: int) -> int:
        """Return the least of all processes' numbers."""
        numbers = torch.tensor([number])
        self._meet(dist.all_reduce, numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def in_turn(self, make: Callable[[], T]) -> T:
        """Make something in the first process before others do, which then find what it has kept."""
        if self.rank:
            self._meet(dist.barrier)
        made = make()
        if not self.rank:
            self._meet(dist.barrier)
        return made

    def tell(self, what: int, *numbers: int) -> None:
        """Tell the other processes what is to be done."""
        self._meet(dist.broadcast, torch.tensor([what, *numbers, *[0] * (_HEAD - 1 - len(numbers))]), 0)

    def hear(self) -> list[int]:
        """Return what the first process tells."""
        told = torch.zeros(_HEAD, dtype=torch.int64)
        self._meet(dist.broadcast, told, 0)
        return told.tolist()

    def share(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first process's numbers, of which the others know how many they are."""
        self._meet(dist.broadcast, torch.from_numpy(values), 0)
        return values

    def close(self) -> None:
        """Part."""
        global _here
        _here = None
        dist.destroy_process_group()


_here: Ranks | None = None  # of this process, for operators, which a graph calls by their names
_OPERATORS = library.Library("xinfer", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(schema: str, compute: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Define an operator for any device; `shape` returns what it returns, without values."""
    name = schema.partition("(")[0]
    _OPERATORS.define(schema)  # type: ignore[no-untyped-call]
    _OPERATORS.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    library.register_fake(f"xinfer::{name}", shape, lib=_OPERATORS)


def _sum_up(x: Tensor) -> Tensor:
    assert _here is not None
    return _here.sum(x)


def _gather(x: Tensor, widths: list[int]) -> Tensor:
    assert _here is not None
    return _here.gather(x, widths)


_operator("sum_up(Tensor x) -> Tensor", _sum_up, lambda x: x.new_empty(x.shape))
_operator("gather(Tensor x, int[] widths) -> Tensor", _gather, lambda x, widths: x.new_empty(x.shape[0], sum(widths)))


class Summed(nn.Module):
    """A part of a layer whose results are added up over all processes."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *arguments: Any) -> Tensor:
        """See the part."""
        summed: Tensor = torch.ops.xinfer.sum_up(self.part(*arguments))
        return summed


class Gathered(nn.Module):
    """A head of which each process has some rows.

    Attributes:
        widths: of how many each.
    """

    def __init__(self, head: nn.Module, share: Share) -> None:
        super().__init__()
        self.head = head
        ends = [replace(share, rank=rank).vocabulary for rank in range(share.count)]
        self.widths = [end - start for start, end in ends]

    def forward(self, x: Tensor) -> Tensor:
        """[K, H] to [K, vocabulary], which has meaning in the first process."""
        logits: Tensor = torch.ops.xinfer.gather(self.head(x), self.widths)
        return logits


class Leader(ModelRunner):
    """Has the others do what the first process's own runner does."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self.runner, self._ranks, self.info = runner, ranks, runner.info

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        arrays = [getattr(batch, name).ravel().astype(np.int64) for name in _FIELDS]
        self._ranks.tell(_FORWARD, len(batch.block_tables), *map(len, arrays))
        self._ranks.share(np.concatenate(arrays))
        return self.runner.forward(batch)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        self._ranks.tell(_COPY, source, target, tokens)
        self.runner.copy(source, target, tokens)

    def metrics(self) -> Mapping[str, Any]:
        """Those of the first process."""
        return self.runner.metrics()

    def close(self) -> None:
        """Let the others end, and end."""
        self._ranks.tell(_CLOSE)
        self.runner.close()
        self._ranks.close()


def led(runner: ModelRunner, ranks: Ranks | None) -> ModelRunner:
    """Return the first process's runner; in others, follow it and leave the program when it is closed."""
    if ranks is None:
        return runner
    if not ranks.rank:
        return Leader(runner, ranks)
    while (told := ranks.hear())[0] != _CLOSE:
        what, *numbers = told
        if what == _COPY:
            runner.copy(*numbers[:3])
        else:
            sequences, *sizes = numbers[: 1 + len(_FIELDS)]
            runner.forward(_batch(ranks.share(np.empty(sum(sizes), np.int64)), sequences, sizes))
    runner.close()
    ranks.close()
    raise SystemExit(0)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return f"{str(error).splitlines()[0]:.120}"


def _batch(values: NDArray[np.int64], sequences: int, sizes: list[int]) -> Batch:
    ends = np.cumsum(sizes)[:-1]
    arrays: dict[str, Any] = {
        name: part if name == "slot_mapping" else part.astype(np.int32)
        for name, part in zip(_FIELDS, np.split(values, ends), strict=True)
    }
    return Batch(**arrays | {"block_tables": arrays["block_tables"].reshape(sequences, -1)})
