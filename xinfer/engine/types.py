"""The data that flows through the engine. No logic lives here."""

__all__ = [
    "Batch",
    "FinishReason",
    "Limits",
    "Request",
    "SamplingParams",
    "Sequence",
    "State",
    "TokenLogprobs",
]

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from xinfer.engine.detokenizer import TextStream
from xinfer.engine.params import SamplingParams
from xinfer.errors import ConfigError

POLICIES = ("fcfs", "priority")
DETERMINISM = ("fast", "invariant")

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine will ask of a runner at most, and how it shares that out; `conf/engine` has the same keys.

    Attributes:
        max_model_len: tokens of prompt and output together; None leaves it to the model.
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step, over all sequences.
        max_logits_rows: rows of logits in one step; None for as many as sequences, and at least 128.
        max_queue: requests that may wait; one more is refused.
        kv_memory: for the KV cache, bytes, or a fraction of the memory that is free; None for just enough for
            `max_num_seqs` sequences of `max_model_len`, within half of the free memory.
        prefix_cache: keep the KV of prompts that have ended, for those that begin alike.
        policy: `fcfs`, first come, first served; or `priority`, see `Scheduler`.
        determinism: `fast`, or `invariant`: a request's tokens and logprobs are the same bit for bit whoever shares its
            steps, however its prompt is cut, put aside, or found in the cache.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_logits_rows: int | None = None
    max_queue: int = 100_000
    kv_memory: float | None = None
    prefix_cache: bool = True
    policy: str = "fcfs"
    determinism: str = "fast"

    def __post_init__(self) -> None:
        numbers = (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_logits_rows",
            "max_queue",
            "kv_memory",
        )
        for name in numbers:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"engine.{name}={value} is out of range: a number above zero is expected")
        for name, choices in (("policy", POLICIES), ("determinism", DETERMINISM)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"engine.{name}={getattr(self, name)!r} is unknown (there are: {', '.join(choices)})")
        if self.logits_rows < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_logits_rows={self.max_logits_rows} is less than engine.max_num_seqs={self.max_num_seqs}: "
                "each sequence needs a row"
            )

    @property
    def logits_rows(self) -> int:
        """Rows of logits in one step at most."""
        return self.max_logits_rows or max(128, self.max_num_seqs)

    @property
    def invariant(self) -> bool:
        """Whether a request's tokens may depend on nothing but the request."""
        return self.determinism == "invariant"


class State(StrEnum):
    """Where a sequence is. One that runs is in `PREFILL` until its first token, and again after it was put aside."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked for, as token ids. `index` counts the requests of a run and gives each its own seed.

    Attributes:
        priority: lower goes first, where the policy is `priority`.
        deadline: the time of the engine's clock at which it ends, done or not.
        cache_salt: the KV of this request is shared only with requests of the same salt.
        bad_words: token ids of each of `params.bad_words`, as often as there are ways to write it.
        arrival: how many requests had come before; orders what else is equal.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability (or logit, as `logprobs_mode` says), and those of the likeliest tokens there.

    Attributes:
        rank: how many tokens are likelier, plus one.
        top: (token id, value) by falling value; of equals the lowest id first; none that can not come.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request on its way: its tokens, how many of them are in the KV cache, and where.

    Attributes:
        token_ids: prompt, then output; the last may be below zero while it is drawn, see `Batch.token_ids`.
        num_prompt: how many of them are the prompt's.
        limit: `len(token_ids)` at which the sequence ends for length.
        sample: which of the request's `n` samples this is.
        siblings: the other samples, as long as they have the prompt still to share.
        num_computed: how many tokens have their keys and values in the cache.
        num_cached: how many of these were found there when the sequence first ran.
        blocks: the cache blocks that hold them, in order.
        chain: for each chunk of the cache's grain, as far as asked for, the hash of all tokens up to its end.
        num_known: how many of these chunks the cache was told of.
        draft: tokens guessed to come next, checked in this step.
        key: its place among those that wait; the smallest goes first. `queued` while it is one of them.
        adjusts: whether its parameters change logits before temperature.
        counts: how often each token of prompt and output occurs in the output; kept only for penalties.
        history: each state with the time of the engine's clock at which it began.
        token_times: when each output token was there.
        prompt_logprobs: of the prompt's second token and those after it, as far as computed.
    """

    request: Request
    token_ids: list[int]
    limit: int
    num_prompt: int = field(init=False)
    text: TextStream | None = None
    sample: int = 0
    siblings: list["Sequence"] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    num_known: int = 0
    draft: list[int] = field(default_factory=list)
    key: tuple[float, int, int] = (0.0, 0, 0)
    queued: bool = False
    adjusts: bool = False
    counts: Counter[int] | None = None
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    history: list[tuple[State, float]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def ending(self) -> bool:
        """Whether nothing of it is left to compute, for it ends with what is being drawn."""
        complete = len(self.token_ids) >= self.limit and self.token_ids[-1] < 0
        return complete or self.num_computed == len(self.token_ids)

    @property
    def running(self) -> bool:
        """Whether it takes part in steps."""
        return self.state is State.PREFILL or self.state is State.DECODE

    @property
    def scores(self) -> bool:
        """Whether logprobs of its prompt are still to be computed."""
        if self.request.params.prompt_logprobs is None or self.sample:
            return False
        return len(self.prompt_logprobs) < self.num_prompt - 1

    def add(self, token: int) -> None:
        """Take a token as the next of its output."""
        self.token_ids.append(token)
        if self.counts is not None:
            self.counts[token] += 1

    def enter(self, state: State, now: float) -> None:
        """Change state and remember when."""
        self.state = state
        self.history.append((state, now))


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work for a runner: S sequences with T new tokens in all, laid end to end.

    Plain host arrays, which the runner may keep until its next call. Prefill, chunked prefill and decode are all this.

    Attributes:
        token_ids: [T] int32; -1 - i for entry i of `drawn`.
        positions: [T] int32, each token's place in its sequence.
        query_starts: [S + 1] int32; sequence s has the tokens from query_starts[s] up to query_starts[s + 1].
        context_lens: [S] int32, tokens in the cache once this step is done, the new ones counted.
        block_tables: [S, M] int32, blocks of each sequence in order; unused places hold -1.
        slot_mapping: [T] int64, where each new token's key and value go: block * block_size + offset.
        sample_at: [K] int32, the tokens (as indices into T) for which logits are wanted.
        adapters: [S] int32, each sequence's adapter; 0 is none.
        drawn: int64 on the runner's device, tokens that the last step drew and the host has not seen yet, below zero
            where there is none; only for runners that can run ahead (capability `ahead`).
    """

    token_ids: Int32
    positions: Int32
    query_starts: Int32
    context_lens: Int32
    block_tables: Int32
    slot_mapping: Int64
    sample_at: Int32
    adapters: Int32
    drawn: Tensor | None = None
