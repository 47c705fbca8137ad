"""xinfer for asyncio: many requests at once, each an asynchronous iterator of its own."""

__all__ = ["AsyncEngine"]

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

from xinfer.api.requests import Delta, Options, Prompt, Service
from xinfer.api.thread import EngineThread, Event
from xinfer.config import Config
from xinfer.engine.outputs import RequestOutput
from xinfer.engine.params import SamplingParams
from xinfer.engine.types import TokenLogprobs
from xinfer.errors import EngineStoppedError


class AsyncEngine:
    """A model on a backend for programs on asyncio: `async with AsyncEngine(...) as engine`.

    Requests are counted as they come, and each derives its seed from the run's and its number, as with `LLM`; where
    many come at once that order is chance, so give `SamplingParams.seed` to a request that is to be repeated. The
    engine steps on a thread of its own, which no reader can hold up. Requests may come from several event loops.

    Args:
        model, backend, overrides, seed: see `LLM`.

    Attributes:
        config: the configuration as composed.
        seed: the run's, given or drawn.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        backend: str | None = None,
        overrides: Sequence[str] = (),
        *,
        seed: int | None = None,
    ) -> None:
        self._service = Service(model, backend, overrides, seed)
        self.config: Config = self._service.session.config
        self.seed = self._service.seed
        self._thread: EngineThread | None = None
        self._closed = False
        self._starting = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._service.session.tokenizer

    @property
    def configured_params(self) -> SamplingParams:
        """What the configuration says of sampling, which is what the command line takes."""
        return self._service.session.params

    async def start(self) -> None:
        """Read the weights, without holding up the event loop; a second time does nothing."""
        with self._starting:
            if self._closed:
                raise EngineStoppedError("the engine is closed: make another")
            if self._thread is None:
                self._thread = EngineThread(self._service.engine, self._service.session.close)
                weakref.finalize(self, self._thread.close)
        await asyncio.wrap_future(self._thread.ready)

    async def close(self) -> None:
        """End the requests that still run, with `FinishReason.ABORT`, and give back memory; later ones are refused."""
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self._thread.close(wait=False)
            await asyncio.wrap_future(self._thread.ended)
            self._thread.join()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[Delta]:
        """Yield what comes of a request, until each of its samples has ended.

        The request begins when the first delta is asked for; a request that is refused raises then: a `RequestError`,
        or an `OverloadedError` where `engine.max_queue` requests wait. What comes while nobody reads is put together,
        so that no more than one delta waits for each sample. Cancelling the task that reads, or closing the iterator,
        ends the request after the step that is running. If the engine fails, all requests raise an
        `EngineStoppedError`.

        Args:
            prompt: a text to continue, token ids, or a list of messages to answer by the model's chat template.
            params: how tokens are chosen; None is `SamplingParams()`, whatever the configuration says.
            options: see `Options`.
        """
        await self.start()
        assert self._thread is not None
        inbox = _Inbox(asyncio.get_running_loop())
        job = self._service.job(prompt, params, inbox.put, options)
        left = job.params.n
        try:
            self._thread.submit([job])
            while left:
                for delta in await inbox.take():
                    left -= delta.output is not None
                    yield delta
        finally:
            if left:
                self._thread.abort([job])


@dataclass(slots=True)
class _Pieces:
    """What has come of one sample and was not read yet."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    output: RequestOutput | None = None

    def delta(self, sample: int) -> Delta:
        return Delta(sample, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs) or None, self.output)


class _Inbox:
    """What the engine's thread has for one reader: at most one delta for each sample, however seldom it reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._there = asyncio.Event()
        self._lock = threading.Lock()
        self._pieces: dict[int, _Pieces] = {}
        self._error: Exception | None = None

    def put(self, event: Event) -> None:
        """Add what has come; on the engine's thread."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed, so nobody can read this")
        with self._lock:
            asleep = not self._pieces and self._error is None
            if isinstance(event, Exception):
                self._error = event
            else:
                pieces = self._pieces.setdefault(event.sample, _Pieces())
                delta = Delta.of(event)
                pieces.texts.append(delta.text)
                pieces.token_ids += delta.token_ids
                pieces.logprobs += delta.logprobs or ()
                pieces.output = delta.output
        if asleep:
            self._loop.call_soon_threadsafe(self._there.set)

    async def take(self) -> list[Delta]:
        """Wait for what comes and return it; an error is raised once what came before it was read."""
        await self._there.wait()
        with self._lock:
            pieces, self._pieces = self._pieces, {}
            if not pieces and self._error is not None:
                raise self._error
            if self._error is None:
                self._there.clear()
        return [these.delta(sample) for sample, these in pieces.items()]
