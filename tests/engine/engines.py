"""Engines on a fake runner of the shape asked for, what comes of requests alone, and the cache's books checked."""

from collections import Counter
from dataclasses import replace

from xinfer.engine.engine import Engine
from xinfer.engine.kv_cache import BlockPool
from xinfer.engine.observers import NOBODY
from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Limits, Request, SamplingParams, Sequence
from xinfer.testing.fake import FakeRunner, FakeTokenizer

VOCAB = 260
DEFAULT = Limits()
INFO = ("hash_size", "kv_tokens", "capabilities", "levels")


class Words(FakeTokenizer):
    """The tokenizer of bytes with what `bad_words` needs."""

    max_token_id = VOCAB - 1

    def encode_words(self, text: str) -> list[int]:
        return list(text.encode())


def fake(kind=FakeRunner, **options):
    """A runner; options that `FakeRunner` does not take are put into its `info`."""
    info = {name: options.pop(name) for name in INFO if name in options}
    runner = kind(**({"vocab_size": VOCAB, "block_size": 16, "num_blocks": 256} | options))
    runner.info = replace(runner.info, **info)
    return runner


def engine(limits=DEFAULT, *, runner=None, tokenizer=None, seed=0, eos=(), observers=NOBODY, **options):
    """An engine on a runner, or on a fake one with these options."""
    named = {n: options.pop(n) for n in ("processors", "speculator", "logprobs_mode", "clock") if n in options}
    runner = runner or fake(max_logits_rows=limits.logits_rows, **options)
    tokenizer = Words() if tokenizer is None else tokenizer
    return Engine(runner, tokenizer, limits, seed=seed, eos_token_ids=eos, observers=observers, **named)


def pool_of(size=4, blocks=16, grain=4, copy=True, kv_tokens=0, prefix_cache=True):
    """A pool for a runner of this shape."""
    capabilities = frozenset({"copy"} if copy else ())
    info = RunnerInfo(260, 512, size, blocks, hash_size=grain, kv_tokens=kv_tokens, capabilities=capabilities)
    return BlockPool(info, prefix_cache)


def sequence(tokens, salt=""):
    """A sequence that has these tokens and no blocks yet."""
    return Sequence(Request("0", 0, tuple(tokens), SamplingParams(), 0, cache_salt=salt), list(tokens), 512)


def check_pool(pool, sequences):
    """Assert that the pool's books agree with one another and with the blocks that these sequences hold."""
    held = [block for sequence in sequences for block in sequence.blocks]
    holders = Counter(held)
    assert pool._holders == [holders[block] for block in range(pool.num_blocks)]
    apart = [*pool._free, *pool._idle, *holders]
    assert sorted(apart) == list(range(pool.num_blocks)), "a block is lost, or in two places"
    assert pool.num_used == len(holders)
    assert pool.num_free == pool.num_blocks - pool.num_used
    assert pool._tokens == sum(pool._filled)
    assert all(pool._filled[block] == 0 for block in pool._free)
    assert all(0 <= filled <= pool.block_size for filled in pool._filled)
    assert pool._tokens <= pool.kv_tokens
    assert set(pool._idle) <= set(pool._known)
    for key, chunk in pool._chunks.items():
        assert all(key in pool._known[block] for block in chunk.blocks)


def finish(running):
    """Step until all is done, the cache's books checked after each step; return results by (request, sample), steps."""
    steps = []
    pool = running.scheduler.pool
    while running.has_work:
        steps.append(running.step())
        check_pool(pool, running.scheduler.running)
    assert pool.num_free == pool.num_blocks
    return {(int(o.request_id), o.sample): o for step in steps for o in step.finished}, steps


def generate(prompt, params, **options):
    """The samples of one request that has an engine to itself."""
    alone = engine(**options)
    alone.add_request(prompt, params)
    outputs, _ = finish(alone)
    return [outputs[0, sample] for sample in range(params.n)]


def what(output):
    """What must not depend on how the work was packed."""
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.error,
        output.logprobs,
        output.prompt_logprobs,
        output.seed,
    )


def params_of(**params):
    """Parameters of a request that goes on to its last token unless these say otherwise."""
    return SamplingParams(**({"max_tokens": 12} | params))
