"""What is checked of a request at the door, so that nothing that is let in can fail for its own shape later."""

__all__ = ["Admission", "Tokenizer"]

from collections.abc import Sequence as Rows
from typing import Any, Protocol

import numpy as np

from xinfer.engine.detokenizer import Decode, TextStream, remembering
from xinfer.engine.logits import LogitsProcessor, asks, check, counted
from xinfer.engine.random import derive
from xinfer.engine.types import Request, SamplingParams, Sequence
from xinfer.errors import RequestError


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; `encode_words(text)` too, for `bad_words`."""

    def decode(self, token_ids: Rows[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens."""


class Admission:
    """Makes sequences of what is asked for; a `RequestError` says why it can never run.

    Args:
        tokenizer: for texts, stop strings and bad words; None leaves texts empty.
        processors: those that a request may name in `params.extra`.
        vocab_size: ids that there are.
        eos_token_ids: tokens that end a text.
        seed: the run's, of which each request's own is derived.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        processors: Rows[LogitsProcessor],
        vocab_size: int,
        eos_token_ids: Rows[int],
        seed: int,
    ) -> None:
        self.tokenizer, self.vocab_size, self.seed = tokenizer, vocab_size, seed
        self.processors = {processor.name: processor for processor in processors}
        self._eos = frozenset(eos_token_ids)
        self._decode = {skip: _decoder(tokenizer, skip) for skip in (False, True)}

    def sequence(
        self,
        prompt: Rows[int],
        params: SamplingParams,
        longest: int,
        *,
        index: int,
        output_token_ids: Rows[int] = (),
        sample: int = 0,
        **others: Any,
    ) -> Sequence:
        """Return a request's first sample, in its `siblings` the others.

        `Engine.add_request` says what the arguments are; `longest` is how many tokens of prompt and output one sequence
        may have, `others` are more fields of the `Request`.
        """
        ids = _prompt(prompt, self.vocab_size)
        _check_length(len(ids), params, longest)
        for name, arguments in params.extra.items():
            if name not in self.processors:
                there = ", ".join(self.processors) or "none"
                raise RequestError(f"extra names {name!r}, but there is no such logits processor (there are: {there})")
            self.processors[name].check(arguments)
        request = Request(
            request_id=str(index),
            index=index,
            prompt_token_ids=ids,
            params=params,
            seed=derive(self.seed, index) if params.seed is None else params.seed,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos,
            bad_words=_bad_words(params, self.tokenizer, self.vocab_size),
            **others,
        )
        check(request, self.vocab_size)
        first = _sequences(request, longest, self._decode[params.skip_special_tokens])
        if output_token_ids or sample:
            _go_on(first, output_token_ids, sample, self.vocab_size)
        return first


def _decoder(tokenizer: Tokenizer | None, skip: bool) -> Decode | None:
    return None if tokenizer is None else remembering(lambda ids: tokenizer.decode(ids, skip))


def _sequences(request: Request, longest: int, decode: Decode | None) -> Sequence:
    """Return a request's first sample, and in its `siblings` the others; without `decode` they have no text."""
    most = request.params.max_tokens
    prompt = request.prompt_token_ids
    limit = longest if most is None else min(len(prompt) + most, longest)
    stop, include = request.params.stop, request.params.include_stop_str_in_output
    samples = [
        Sequence(
            request,
            list(prompt),
            limit,
            text=None if decode is None else TextStream(decode, prompt, stop, include),
            sample=sample,
            adjusts=asks(request),
            counts=counted(request),
        )
        for sample in range(request.params.n)
    ]
    samples[0].siblings = samples[1:]
    return samples[0]


def _go_on(sequence: Sequence, output: Rows[int], sample: int, vocab_size: int) -> None:
    """Give a sequence that has not run what it generated elsewhere; its next token is the one that came after that."""
    if sequence.siblings:
        raise RequestError(f"n={len(sequence.siblings) + 1}: one sample at a time goes on after given tokens: take n=1")
    tokens = _ids(output, vocab_size, "output token")
    if len(sequence.token_ids) + len(tokens) >= sequence.limit:
        raise RequestError(
            f"of {sequence.limit - sequence.num_prompt} tokens that may be generated {len(tokens)} are given: raise "
            "max_tokens to have more"
        )
    sequence.sample = sample
    for number, token in enumerate(tokens, 1):
        sequence.add(token)
        if sequence.text is not None:
            sequence.text.push(token, number >= sequence.request.params.min_tokens)


def _prompt(prompt: Rows[int], vocab_size: int) -> tuple[int, ...]:
    if not len(prompt):
        raise RequestError("the prompt has no tokens: give it at least one")
    return _ids(prompt, vocab_size, "prompt token")


def _ids(tokens: Rows[int], vocab_size: int, what: str) -> tuple[int, ...]:
    for token in tokens:
        whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab_size:
            raise RequestError(f"{what} {token!r} is not an id of the vocabulary (0 to {vocab_size - 1})")
    return tuple(int(token) for token in tokens)


def _check_length(prompt: int, params: SamplingParams, longest: int) -> None:
    most, least = params.max_tokens, params.min_tokens
    if prompt >= longest + (most == 0):
        raise RequestError(
            f"the prompt has {prompt} tokens, but the context holds {longest} with at least one generated: "
            "shorten it, or raise engine.max_model_len or engine.kv_memory if model and memory allow"
        )
    if most is not None and prompt + most > longest:
        raise RequestError(
            f"the prompt's {prompt} tokens and max_tokens={most} make {prompt + most}, but the context holds "
            f"{longest}: lower max_tokens, or leave it null to fill the context"
        )
    if prompt + least > longest:
        raise RequestError(
            f"the prompt's {prompt} tokens and min_tokens={least} make {prompt + least}, but the context holds "
            f"{longest}: lower min_tokens"
        )


def _bad_words(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return each bad word's tokens as a text begins with it and as it follows a space.

    A way of writing it that needs ids beyond the model's vocabulary can't come anyway.
    """
    if not params.bad_words:
        return ()
    encode: Any = getattr(tokenizer, "encode_words", None)
    if encode is None:
        raise RequestError("bad_words needs a tokenizer that encodes words, and there is none")
    ways = [tuple(encode(form)) for word in params.bad_words for form in (word, f" {word.lstrip()}")]
    return tuple(dict.fromkeys(way for way in ways if way and max(way) < vocab_size))
