"""How one request's tokens are chosen: every parameter, checked when it is made."""

__all__ = ["SamplingParams"]

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from xinfer.engine.random import MAX_SEED
from xinfer.errors import RequestError

_MOST_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. Names and defaults are vLLM's; out of range is a `RequestError`.

    Applied in this order: penalties, logit bias, masks (allowed tokens, bad words, min_tokens), temperature, min-p,
    top-k, top-p, draw.

    Attributes:
        n: samples of the same prompt; sample i draws its own numbers, so 0 is what n=1 gives.
        temperature: 0 takes the likeliest token (ties: the lowest id), whatever seed and filters say.
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
        top_p: of these, keep the fewest whose probability reaches this.
        min_p: drop tokens less likely than this share of the likeliest one's probability.
        seed: 0 to 2**64 - 1; None derives it from the run's seed and the request's index.
        presence_penalty: taken off the logit of every token of the output, -2 to 2.
        frequency_penalty: the same, once for each time that the token occurs in the output.
        repetition_penalty: 0.01 to 100; divides the positive and multiplies the negative logits of all tokens of prompt
            and output.
        logit_bias: added to these tokens' logits, -100 to 100.
        allowed_token_ids: no other token can come; None allows all.
        bad_words: texts that can't come, as the tokenizer writes them at a text's start and after a space.
        max_tokens: tokens to generate at most; None fills the context, 0 only computes (and scores) the prompt.
        min_tokens: before this many, nothing ends the text: no stop string, and stop tokens can't come.
        stop: the text ends before the first of these strings.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: go on after the model's end-of-sequence tokens.
        logprobs: for each token its log-probability, its rank, and those of so many of the likeliest tokens.
        prompt_logprobs: the same for the prompt's tokens.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        skip_special_tokens: leave special tokens out of the text.
        extra: arguments of logits processors, by the processor's name.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)  # plain numbers, so that records can hold them
        put("n", _integer("n", self.n, 1, _MOST_SAMPLES))
        for name, low, high in _RANGES:
            put(name, _number(name, getattr(self, name), low, high))
        put("top_k", _integer("top_k", self.top_k, -1))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        for name, most in _OPTIONAL:
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), 0, most))
        put("stop", _texts("stop", self.stop))
        put("bad_words", _texts("bad_words", self.bad_words))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        put("logit_bias", _bias(self.logit_bias))
        if not isinstance(self.extra, Mapping):
            raise RequestError(f"extra={self.extra!r} is not a mapping from logits processors to their arguments")
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids=[] allows no token: leave it null to allow all")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower it")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that the seed does not matter."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalizes(self) -> bool:
        """Whether the tokens that were there before matter."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_RANGES = (
    ("temperature", 0, math.inf),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),
)
_OPTIONAL = (("seed", MAX_SEED), ("max_tokens", math.inf), ("logprobs", math.inf), ("prompt_logprobs", math.inf))


def _number(name: str, value: object, low: float, high: float) -> float:
    number = math.nan
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not low <= number <= high or math.isinf(number):
        bound = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
        raise RequestError(f"{name}={value!r} is out of range: a finite number {bound} is expected")
    return number


def _integer(name: str, value: object, low: int, high: float = math.inf) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= high:  # type: ignore[call-overload]
        bound = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
        raise RequestError(f"{name}={value!r} is out of range: a whole number {bound} is expected")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name}={value!r} is not a list")
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(name, token_id, 0) for token_id in _tuple(name, value))


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _tuple(name, value)
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name}={list(texts)!r}: each must be a text of at least one character")
    return texts


def _bias(value: object) -> dict[int, float]:
    """Return token ids with what is added to their logits; JSON has the ids as texts."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias={value!r} is not a mapping from token ids to numbers")
    bias = {}
    for key, number in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        token_id = _integer("logit_bias, token id", int(key) if digits else key, 0)
        bias[token_id] = _number(f"logit_bias[{token_id}]", number, -100, 100)
    return bias
