"""Random workloads for the engine, each from one number: requests that come, share prefixes, are put aside and aborted.

What comes of a request must be what comes of it alone, tokens and logprobs bit for bit; no block may leak, and nobody
may wait forever. `check` runs one workload and says what it met; a failure names its number, which replays it.
"""

__all__ = ["Met", "Workload", "check", "outputs_of", "workload"]

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from xinfer.engine.engine import Engine
from xinfer.engine.outputs import RequestOutput
from xinfer.engine.runner import ModelRunner
from xinfer.engine.speculative import NgramProposer, Speculator
from xinfer.engine.types import FinishReason, Limits, SamplingParams, TokenLogprobs

Key = tuple[int, int]  # a request's index, and which of its samples
Logprobs = Sequence[TokenLogprobs | None] | None

_PLAIN: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
}
_ROOMY = Limits(max_num_batched_tokens=4096, prefix_cache=False)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes (before which step), and, if it is aborted, before which."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    aborted: int | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that happens, but for what the model says.

    Attributes:
        cache: of the runner: block_size, num_blocks, hash_size, and perhaps kv_tokens.
        speculates: whether tokens are guessed.
    """

    seed: int
    limits: Limits
    cache: dict[str, Any]
    arrivals: tuple[Arrival, ...]
    speculates: bool


@dataclass(frozen=True, slots=True)
class Met:
    """What a workload met on its way."""

    preemptions: int
    cached_tokens: int
    copies: int
    accepted_tokens: int
    aborted: int


MakeRunner = Callable[[dict[str, Any]], ModelRunner]


_COUNTED = ("preemptions", "cached_tokens", "copies", "accepted_tokens")


def workload(seed: int, vocab_size: int = 260, longest: int = 96, *, plain: bool = False) -> Workload:
    """Return workload number `seed`, for a model with these ids and sequences of at most `longest` tokens.

    A plain one asks for nothing but tokens, so that a runner that can run ahead does.
    """
    draw = Random(seed)  # noqa: S311  # nothing secret
    block_size = draw.choice([1, 2, 3, 4, 8, 16, 16, 16, 32, longest])
    whole = -(-longest // block_size)
    num_blocks = draw.choice([whole, whole, whole + 1, whole * 2, whole * 20])
    cache = {"block_size": block_size, "num_blocks": num_blocks, "hash_size": draw.choice([4, 8, 16])}
    if block_size == longest:
        cache["kv_tokens"] = draw.randint(longest, num_blocks * longest)
    limits = Limits(
        max_num_seqs=draw.choice([1, 3, 8, 8, 32, 32]),
        max_num_batched_tokens=draw.choice([4, 5, 7, 16, 33, 64, 512]),
        max_logits_rows=draw.choice([None, 32, 33]),
        prefix_cache=draw.random() < 0.8,
        policy=draw.choice(["fcfs", "priority"]),
        determinism="invariant",
    )
    beginnings = [_tokens(draw, vocab_size, draw.randint(8, longest * 2 // 3)) for _ in range(2)]
    arrivals = []
    for _ in range(draw.randint(2, 12)):
        beginning = draw.choice(beginnings)[: draw.choice([0, 9, 20, 33])]
        prompt = (beginning + _tokens(draw, vocab_size, draw.randint(1, 12)))[: longest - 1]
        if draw.random() < 0.2:
            prompt = (prompt[-9:] * 3)[: longest - 25]  # something to be guessed from
        beginnings.append(prompt)
        arrival = _arrival(draw, prompt, longest)
        arrivals.append(replace(arrival, params=replace(arrival.params, **_PLAIN)) if plain else arrival)
    return Workload(seed, limits, cache, tuple(arrivals), draw.random() < 0.4 and not plain)


def _tokens(draw: Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocab_size) for _ in range(count))


def _arrival(draw: Random, prompt: tuple[int, ...], longest: int) -> Arrival:
    most = draw.randint(1, min(40, longest - len(prompt)))
    params = SamplingParams(
        n=draw.choice([1, 1, 1, 2, 3]),
        temperature=draw.choice([0.0, 0.0, 0.7, 1.0]),
        top_k=draw.choice([0, 0, 5]),
        top_p=draw.choice([1.0, 0.9]),
        max_tokens=draw.choice([most, most, most, 0]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        logprobs=draw.choice([None, 0, 2]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
        stop_token_ids=tuple(draw.sample(range(200), draw.choice([0, 0, 10]))),
    )
    step = draw.choice([0, 0, draw.randint(0, 30)])
    aborted = step + draw.randint(0, 20) if draw.random() < 0.15 else None
    return Arrival(step, prompt, params, draw.choice([0, 0, 1]), aborted)


def check(work: Workload, make_runner: MakeRunner, tolerance: float = 0.0) -> Met:
    """Run a workload, compare each request with itself alone, and return what was met on the way.

    Args:
        work: the workload.
        make_runner: returns a runner for `Workload.cache`, or a roomy one for an empty dictionary.
        tolerance: by how much logprobs may differ, of a runner that promises less than all; tokens may not.
    """
    try:
        outputs, met = _together(work, make_runner(work.cache))
    except Exception as error:
        error.add_note(f"workload {work.seed}")
        raise
    roomy = make_runner({})
    for index, arrival in enumerate(work.arrivals):
        for key, alone in _alone(index, arrival, roomy, work.limits.determinism).items():
            _compare(f"workload {work.seed}, request {key}", outputs[key], alone, tolerance)
    return met


def outputs_of(work: Workload, make_runner: MakeRunner) -> dict[Key, RequestOutput]:
    """Run a workload, and return what came of each sample of each request."""
    return _together(work, make_runner(work.cache))[0]


def _together(work: Workload, runner: ModelRunner) -> tuple[dict[Key, RequestOutput], Met]:
    speculator = Speculator(NgramProposer(2, 1), 3, always=True) if work.speculates else None
    engine = Engine(runner, None, work.limits, seed=7, speculator=speculator)
    outputs: dict[Key, RequestOutput] = {}
    met: Counter[str] = Counter()
    patience = 100 + 30 * sum((len(a.prompt) + (a.params.max_tokens or 0)) * a.params.n for a in work.arrivals)
    coming = sorted(range(len(work.arrivals)), key=lambda index: work.arrivals[index].step)
    step = 0
    while coming or engine.has_work:
        while coming and work.arrivals[coming[0]].step <= step:
            index = coming.pop(0)
            arrival = work.arrivals[index]
            engine.add_request(arrival.prompt, arrival.params, index=index, priority=arrival.priority)
        for index, arrival in enumerate(work.arrivals):
            if arrival.aborted == step:
                engine.abort(str(index))
        result = engine.step()
        outputs |= {(output.index, output.sample): output for output in result.finished}
        met.update({name: getattr(result.stats, name) for name in _COUNTED})
        _check_blocks(work, engine)
        step += 1
        assert step < patience, f"workload {work.seed}: {step} steps, and requests still wait"
    pool = engine.scheduler.pool
    assert pool.num_used == 0, f"workload {work.seed}: {pool.num_used} blocks are held by nobody"
    aborted = sum(output.finish_reason is FinishReason.ABORT for output in outputs.values())
    return outputs, Met(aborted=aborted, **met)


def _check_blocks(work: Workload, engine: Engine) -> None:
    """Every block that is in use is some running sequence's."""
    held = {block for sequence in engine.scheduler.running for block in sequence.blocks}
    used = engine.scheduler.pool.num_used
    assert used == len(held), f"workload {work.seed}: {used} blocks are in use, running sequences hold {len(held)}"


def _alone(index: int, arrival: Arrival, runner: ModelRunner, determinism: str) -> dict[Key, RequestOutput]:
    """Return what comes of each sample of a request that has the engine to itself, one by one."""
    engine = Engine(runner, None, replace(_ROOMY, determinism=determinism), seed=7)
    engine.add_request(arrival.prompt, arrival.params, index=index)
    return {(output.index, output.sample): output for step in engine.run() for output in step.finished}


def _compare(where: str, output: RequestOutput, alone: RequestOutput, tolerance: float) -> None:
    if output.finish_reason is FinishReason.ABORT:
        count = len(output.token_ids)
        logprobs = None if alone.logprobs is None else alone.logprobs[:count]
        alone = replace(alone, token_ids=alone.token_ids[:count], logprobs=logprobs)
    else:
        assert output.finish_reason == alone.finish_reason, (
            f"{where}: {output.finish_reason}, {alone.finish_reason} alone"
        )
        near = _near(output.prompt_logprobs, alone.prompt_logprobs, tolerance)
        assert near, f"{where}: other prompt_logprobs than alone"
    assert output.token_ids == alone.token_ids, f"{where}: {output.token_ids}, {alone.token_ids} alone"
    assert _near(output.logprobs, alone.logprobs, tolerance), f"{where}: other logprobs than alone"


def _near(these: Logprobs, those: Logprobs, tolerance: float) -> bool:
    """Whether logprobs are equal, or those of the tokens themselves differ by no more than this."""
    if not tolerance or these is None or those is None:
        return these == those
    pairs = [(a, b) for a, b in zip(these, those, strict=True) if a is not None and b is not None]
    same = [a and a.token_id for a in these] == [b and b.token_id for b in those]
    return same and all(abs(a.logprob - b.logprob) <= tolerance for a, b in pairs)
