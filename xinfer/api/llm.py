"""xinfer in plain Python: prompts in, results out."""

__all__ = ["LLM"]

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, Unpack

from xinfer.api.requests import Conversation, Delta, GenerateOutput, Options, Prompt, Service, is_ids
from xinfer.api.thread import EngineThread, Event, Job
from xinfer.config import Config
from xinfer.engine.outputs import RequestOutput, TokenOutput
from xinfer.engine.params import SamplingParams
from xinfer.engine.runner import RunnerInfo
from xinfer.errors import RequestError

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model on a backend, ready to generate; a `UsageError` says what can't be done as asked.

    Requests are counted over all calls, and each derives its seed from the run's and its number: the same prompt asked
    again draws other numbers, unless its parameters have a seed; a program that is run again with the same `seed` and
    makes the same calls gets the same tokens. Threads may call at the same time: their requests share the engine's
    steps, and are counted as they come.

    Nothing is recorded or printed; events go to the logger `xinfer`, plugins hear of steps, tokens and results.

    Args:
        model: a folder, a .gguf file or a reference, as for `--model`; None takes the default model.
        backend: by name; None takes the default one.
        overrides: any other key of the configuration in Hydra's grammar, as on the command line.
        seed: the run's; None takes `sampling.seed`, and where that is not given either, draws one.

    Attributes:
        config: the configuration as composed.
        seed: the run's, given or drawn.
        info: what the backend's runner reports of itself.
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
        engine = self._service.engine()  # on this thread, so that Ctrl-C ends reading weights
        self._thread = EngineThread(lambda: engine, self._service.session.close)
        self.info: RunnerInfo = engine.runner.info
        self._finalizer = weakref.finalize(self, self._thread.close)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._service.session.tokenizer

    @property
    def configured_params(self) -> SamplingParams:
        """What the configuration says of sampling, which is what the command line takes."""
        return self._service.session.params

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Params = None,
        **options: Unpack[Options],
    ) -> list[GenerateOutput]:
        """Continue texts; return a result for each, in their order.

        A request that is refused is a `RequestError`, and none of the call's requests runs then. One that fails later
        ends with `FinishReason.ERROR`, and its neighbours go on. Ctrl-C ends all of the call's requests.

        Args:
            prompts: one text or several, one prompt's token ids or several's.
            params: for all prompts, or one for each; None is `SamplingParams()`, whatever the configuration says.
            options: see `Options`.
        """
        return self._run(_several(prompts, isinstance(prompts, str) or is_ids(prompts)), params, options)

    def chat(
        self, conversations: Conversation | Sequence[Conversation], params: Params = None, **options: Unpack[Options]
    ) -> list[GenerateOutput]:
        """Answer conversations by the model's chat template; return a result for each, as `generate` does.

        Args:
            conversations: one list of messages (`{"role": ..., "content": ...}`), or several.
            params: see `generate`.
            options: see `generate`.
        """
        one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        return self._run(_several(conversations, one), params, options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Iterator[Delta]:
        """Yield a delta for each token as it comes, and one for each sample's end, which has its result.

        The request begins when the first delta is asked for. Closing the iterator, or letting go of it, ends the
        request and frees its blocks.

        Args:
            prompt: a text to continue, token ids, or a list of messages to answer.
            params: see `generate`.
            options: see `generate`.
        """
        events: SimpleQueue[Event] = SimpleQueue()
        job = self._service.job(prompt, params, events.put, options)
        left = job.params.n
        try:
            self._thread.submit([job])
            while left:
                event = events.get()
                if isinstance(event, Exception):
                    raise event
                left -= isinstance(event, RequestOutput)
                yield Delta.of(event)
        finally:
            if left:
                self._thread.abort([job], wait=True)

    def close(self) -> None:
        """End the requests that still run, with `FinishReason.ABORT`, and give back memory; later calls are refused."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, prompts: list[Prompt], params: Params, options: Options) -> list[GenerateOutput]:
        """Run requests together; return each one's result."""
        events: SimpleQueue[tuple[int, RequestOutput | Exception]] = SimpleQueue()

        def listen(place: int, event: Event) -> None:
            if not isinstance(event, TokenOutput):
                events.put((place, event))

        each = _one_each(params, len(prompts))
        jobs: list[Job] = []
        for place, prompt in enumerate(prompts):
            try:
                jobs.append(self._service.job(prompt, each[place], partial(listen, place), options))
            except RequestError as error:
                raise _located(error, place, len(prompts)) from error
        results: list[list[RequestOutput]] = [[] for _ in prompts]
        left = sum(job.params.n for job in jobs)
        try:
            self._thread.submit(jobs)
            while left:
                place, event = events.get()
                if isinstance(event, Exception):
                    raise _located(event, place, len(prompts))
                results[place].append(event)
                left -= 1
        finally:
            if left:
                self._thread.abort(jobs, wait=True)
        return [GenerateOutput.of(prompt, samples) for prompt, samples in zip(prompts, results, strict=True)]


def _several(prompts: Any, one: bool) -> list[Prompt]:
    return [prompts] if one else list(prompts)


def _one_each(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts: give one for all, or one for each")
    return list(params)


def _located(error: Exception, place: int, count: int) -> Exception:
    """Say which of several prompts was refused."""
    return RequestError(f"prompts[{place}]: {error}") if isinstance(error, RequestError) and count > 1 else error
