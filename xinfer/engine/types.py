"""The data that flows through the engine. No logic lives here beyond checking what users send."""

__all__ = [
    "Batch",
    "FinishReason",
    "Limits",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "State",
    "StepOutput",
    "StepStats",
    "TokenOutput",
]

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.engine.detokenizer import TextStream
from xinfer.engine.random import MAX_SEED
from xinfer.engine.stats import GenerateStats
from xinfer.errors import RequestError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine will ask of a runner at most; the same numbers bound the scheduler.

    Attributes:
        max_model_len: tokens of prompt and output together; None leaves it to the model.
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step, over all sequences.
        kv_memory: for the KV cache, bytes, or a fraction of the memory that is free; None for just enough for
            `max_num_seqs` sequences of `max_model_len`, within half of the free memory.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_memory: float | None = None

    @property
    def max_logits_rows(self) -> int:
        """Rows of logits that one step asks for at most: one for each sequence."""
        return self.max_num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. Names and defaults are vLLM's; out of range is a `RequestError`.

    Attributes:
        temperature: 0 takes the likeliest token (ties: the lowest id), whatever seed and filters say.
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
        top_p: of these, keep the fewest whose probability reaches this.
        min_p: drop tokens less likely than this share of the likeliest one's probability.
        seed: 0 to 2**64 - 1; None derives it from the run's seed and the request's index.
        max_tokens: tokens to generate at most; None fills the context.
        stop: the text ends before the first of these strings.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: go on after the model's end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        skip_special_tokens: leave special tokens out of the text.
        extra: arguments of logits processors, by the processor's name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)  # plain numbers, so that records can hold them
        put("temperature", _number("temperature", self.temperature, math.inf))
        put("top_p", _number("top_p", self.top_p, 1))
        put("min_p", _number("min_p", self.min_p, 1))
        put("top_k", _integer("top_k", self.top_k, -1))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, MAX_SEED))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        put("stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop={list(self.stop)!r}: each must be a text of at least one character")
        ids = _tuple("stop_token_ids", self.stop_token_ids)
        put("stop_token_ids", tuple(_integer("stop_token_ids", token_id, 0) for token_id in ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that the seed does not matter."""
        return self.temperature == 0 or self.top_k == 1


def _number(name: str, value: object, high: float) -> float:
    number = math.nan
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not 0 <= number <= high or math.isinf(number):
        bound = f"from 0 to {high}" if high < math.inf else "of at least 0"
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


class State(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked for, as token ids. `index` counts the requests of a run and gives each its own seed."""

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way: its tokens, how many of them are in the KV cache, and where.

    Attributes:
        token_ids: prompt, then output.
        num_computed: how many of them have their keys and values in the cache.
        blocks: the cache blocks that hold them, in order.
        limit: `len(token_ids)` at which the sequence ends for length.
        history: each state with the time (`time.perf_counter()`) at which it began.
        token_times: when each output token was there.
    """

    request: Request
    token_ids: list[int]
    limit: int
    text: TextStream | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    history: list[tuple[State, float]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt :]

    def enter(self, state: State, now: float) -> None:
        """Change state and remember when."""
        self.state = state
        self.history.append((state, now))


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work for a runner: S sequences with T new tokens in all, laid end to end.

    Plain host arrays, which the runner may keep until its next call. Prefill, chunked prefill and decode are all this.

    Attributes:
        token_ids: [T] int32.
        positions: [T] int32, each token's place in its sequence.
        query_starts: [S + 1] int32; sequence s has the tokens from query_starts[s] up to query_starts[s + 1].
        context_lens: [S] int32, tokens in the cache once this step is done, the new ones counted.
        block_tables: [S, M] int32, blocks of each sequence in order; unused places hold -1.
        slot_mapping: [T] int64, where each new token's key and value go: block * block_size + offset.
        sample_at: [K] int32, the tokens (as indices into T) for which logits are wanted.
        adapters: [S] int32, each sequence's adapter; 0 is none.
    """

    token_ids: Int32
    positions: Int32
    query_starts: Int32
    context_lens: Int32
    block_tables: Int32
    slot_mapping: Int64
    sample_at: Int32
    adapters: Int32


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one request, with the text that became certain with it."""

    request: Request
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's result. `text` is the deltas of its `TokenOutput`s joined, and the held-back tail."""

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    tail: str
    finish_reason: FinishReason
    params: SamplingParams
    seed: int
    stats: GenerateStats
    history: tuple[tuple[str, float], ...]
    token_times: tuple[float, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did and how long its parts took, in milliseconds; the parts add up to `step_ms`.

    `kv_tokens` counts the tokens whose keys and values the step reads: each sequence's context. `time` is that of
    `time.perf_counter()` when the step began. Tokens computed again after a preemption count as prefill.
    """

    step: int
    time: float
    stage: str
    prefill_tokens: int
    decode_tokens: int
    batch_size: int
    scheduler_queue_length: int
    preemptions: int
    kv_tokens: int
    kv_blocks_used: int
    kv_blocks_free: int
    schedule_ms: float
    forward_ms: float
    sample_ms: float
    output_ms: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought."""

    tokens: tuple[TokenOutput, ...]
    finished: tuple[RequestOutput, ...]
    stats: StepStats
