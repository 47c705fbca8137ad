"""What programs give and get: models and prompts in the forms in which they come, texts as they grow, results."""

__all__ = ["Conversation", "Delta", "GenerateOutput", "Options", "Prompt", "Service", "is_ids"]

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from xinfer import inputs
from xinfer.api.thread import Event, Job
from xinfer.composing import compose
from xinfer.engine.engine import Engine
from xinfer.engine.outputs import RequestOutput, TokenOutput
from xinfer.engine.params import SamplingParams
from xinfer.engine.random import fresh_seed
from xinfer.engine.types import FinishReason, TokenLogprobs
from xinfer.errors import ConfigError, RequestError
from xinfer.flags import quote_text
from xinfer.models.text.tokenizer import Message
from xinfer.plugins import load_plugins
from xinfer.session import Session

Conversation = Sequence[Message]
Prompt = str | Sequence[int] | Conversation


class Options(TypedDict, total=False):
    """What a request may say besides its parameters; see `Engine.add_request`."""

    priority: int
    timeout_s: float | None
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come of one sample of a request since the last delta of it; the last one has the whole result.

    Attributes:
        sample: which of the request's `n` samples this is.
        text: what became certain; all of a sample's joined are its text.
        token_ids: tokens that came; none where only the end or held-back text did.
        logprobs: one for each of these tokens, or None where they were not asked for.
        output: the sample's result, with its last delta.
    """

    sample: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    output: RequestOutput | None = None

    @property
    def token_id(self) -> int | None:
        """The last of the tokens."""
        return self.token_ids[-1] if self.token_ids else None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample has ended, with its last delta."""
        return self.output.finish_reason if self.output is not None else None

    @classmethod
    def of(cls, event: TokenOutput | RequestOutput) -> "Delta":
        """Return what one token brought, or the end."""
        if isinstance(event, RequestOutput):
            return cls(event.sample, event.tail, output=event)
        logprobs = (event.logprobs,) if event.logprobs is not None else None
        return cls(event.sample, event.text, (event.token_id,), logprobs)


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """A request's result.

    Attributes:
        prompt: the text as it was given; None for token ids and conversations.
        prompt_logprobs: one for each token of the prompt, the first of which has none; None if not asked for.
        outputs: one for each of the request's `n` samples, in their order.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[RequestOutput, ...]

    @classmethod
    def of(cls, prompt: object, samples: Sequence[RequestOutput]) -> "GenerateOutput":
        """Put a request's samples together."""
        outputs = tuple(sorted(samples, key=lambda output: output.sample))
        text = prompt if isinstance(prompt, str) else None
        return cls(text, outputs[0].prompt_token_ids, outputs[0].prompt_logprobs, outputs)


class Service:
    """A session as a program opens it, its run's seed, and requests for it from prompts as programs give them."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        backend: str | None,
        overrides: Sequence[str],
        seed: int | None,
    ) -> None:
        if isinstance(overrides, str):
            raise ConfigError(f"overrides={overrides!r}: a list of them is expected, as in [{overrides!r}]")
        words = [f"backend={quote_text(backend)}"] if backend is not None else []
        words += [f"model.reference={quote_text(os.fspath(model))}"] if model is not None else []
        plugins = load_plugins()
        self.session = Session(compose([*words, *overrides], plugins), plugins)
        configured = self.session.config.sampling.seed if seed is None else SamplingParams(seed=seed).seed
        self.seed = fresh_seed() if configured is None else configured

    def engine(self) -> Engine:
        """Make the engine: read the model, what is small of it first."""
        self.session.check()
        _ = self.session.tokenizer
        try:
            return self.session.engine(self.seed, self.session.plugins.observers())
        except BaseException:  # Ctrl-C too: what was read so far is given back
            self.session.close()
            raise

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Callable[[Event], None],
        options: Options,
    ) -> Job:
        """Return a request: of a text to continue, of token ids, or of a conversation to answer."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params={params!r:.80}: SamplingParams are expected")
        params = self.session.with_stop_tokens(params)
        if options.get("timeout_s") is None:
            options = {**options, "timeout_s": self.session.config.engine.timeout_s}
        return Job(self._encode(prompt), params, listener, **options)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.session.encode(inputs.Prompt(prompt, chat=False))[0]
        if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
            raise RequestError(f"{prompt!r:.80} is no prompt: a text, token ids or a list of messages is expected")
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.session.encode_chat(prompt)
        return self.session.encode(inputs.Prompt(token_ids=tuple(prompt)))[0]


def is_ids(prompts: Any) -> bool:
    """Whether this is one prompt's token ids, rather than several prompts."""
    return len(prompts) > 0 and isinstance(prompts[0], Integral)
