"""A request's samples, texts and logprobs are its own: whatever else runs, is shared, guessed, put aside, or ends."""

from dataclasses import dataclass, replace

from engines import Words, check_pool, engine, finish, generate, what
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.engine.random import derive
from xinfer.engine.speculative import NgramProposer, Speculator
from xinfer.engine.types import FinishReason, Limits, SamplingParams
from xinfer.testing.fake import EOS

ENDS = [EOS, 257]


@dataclass(frozen=True)
class Work:
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: str


class Guess:
    """Proposes what was drawn for it: right, wrong, nothing, or far too much."""

    def __init__(self, drafts):
        self.drafts, self.calls = drafts, 0

    def propose(self, sequences, count):
        self.calls += 1
        return [list(self.drafts[(self.calls + n) % len(self.drafts)]) for n, _ in enumerate(sequences)]

    def forget(self, sequence):
        pass


class Always(Speculator):
    """Guesses whether it pays or not."""

    def _pays(self, batch):
        return True


few = st.integers(0, 3) | st.integers(0, 259)
prompts = st.builds(
    lambda head, tail: tuple((head * 9)[:35] + tail),  # so that many begin alike
    head=st.sampled_from([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]]),
    tail=st.lists(few, max_size=5),
) | st.lists(few, min_size=1, max_size=40).map(tuple)
sampling = st.builds(
    lambda min_tokens, max_tokens, **params: SamplingParams(
        min_tokens=min(min_tokens, max_tokens), max_tokens=max_tokens, **params
    ),
    n=st.sampled_from([1, 1, 1, 2, 3, 5]),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {7: 3.0, 8: -2.5}]),
    allowed_token_ids=st.sampled_from([None, None, tuple(range(0, 260, 2))]),
    bad_words=st.sampled_from([(), (), ("a", "b c", "\x07")]),
    max_tokens=st.integers(0, 24),
    min_tokens=st.sampled_from([0, 0, 5]),
    stop=st.sampled_from([(), ("a", "bc"), ("\ufffd\ufffd",)]),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 250, 25))]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
)
works = st.builds(Work, prompts, sampling, st.integers(-1, 1), st.sampled_from(["", "", "", "b"]))


@st.composite
def engines(draw):
    """An engine's limits and its runner, most of them too tight for all requests at once."""
    seqs = draw(st.integers(1, 8))
    limits = Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 33, 2048])),
        max_logits_rows=draw(st.sampled_from([None, seqs, seqs + 3])),
        prefix_cache=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )
    size = draw(st.sampled_from([1, 2, 3, 8, 16, 64]))
    needed = -(-64 // size)  # the longest sequence of `works`
    blocks = draw(st.integers(needed, 3 * needed))
    runner = {
        "block_size": size,
        "num_blocks": blocks,
        "max_model_len": 64,
        "hash_size": draw(st.sampled_from([2, 4, 16])),
        "kv_tokens": draw(st.sampled_from([0, 64, 100])) if blocks * size > 100 else 0,
        "capabilities": frozenset(draw(st.sampled_from([("copy", "free"), ("free",)]))),
    }
    speculator = draw(st.sampled_from([None, "ngram", "guess"]))
    if speculator == "ngram":
        runner["speculator"] = Always(NgramProposer(3, 1), draw(st.integers(1, 6)))
    if speculator == "guess":
        drafts = st.lists(st.lists(few, max_size=9), min_size=1, max_size=4)
        runner["speculator"] = Always(Guess(draw(drafts)), 3)
    return limits, runner


def add(running, work):
    return running.add_request(work.prompt, work.params, priority=work.priority, cache_salt=work.salt)


def alone(index, work):
    seed = derive(3, index) if work.params.seed is None else work.params.seed
    params = replace(work.params, seed=seed)
    return generate(work.prompt, params, limits=Limits(prefix_cache=False), eos=ENDS, max_model_len=64)


def assert_as_alone(index, work, outputs):
    for sample, expected in enumerate(alone(index, work)):
        assert what(outputs[index, sample]) == what(expected)


def assert_deltas_make_texts(outputs, steps):
    for (index, sample), output in outputs.items():
        tokens = [t for step in steps for t in step.tokens if (t.request.index, t.sample) == (index, sample)]
        assert tuple(token.token_id for token in tokens) == output.token_ids
        assert "".join(token.text for token in tokens) + output.tail == output.text
        if output.logprobs is not None:
            assert tuple(token.logprobs for token in tokens) == output.logprobs


@settings(max_examples=100)
@given(st.lists(works, min_size=1, max_size=6), engines(), st.data())
def test_requests_together_equal_each_alone(requests, shape, data):
    limits, runner = shape
    running = engine(limits, seed=3, eos=ENDS, **runner)
    late = data.draw(st.integers(0, len(requests)))  # these come while others already run
    steps = []
    for i, work in enumerate(requests):
        add(running, work)
        if i >= late:
            steps.append(running.step())
    outputs, more = finish(running)
    outputs |= {(int(o.request_id), o.sample): o for step in steps for o in step.finished}
    steps += more
    assert len(outputs) == sum(work.params.n for work in requests)
    for i, work in enumerate(requests):
        assert_as_alone(i, work, outputs)
    for step in steps:
        assert step.stats.batch_size <= limits.max_num_seqs
        assert step.stats.prefill_tokens + step.stats.decode_tokens <= limits.max_num_batched_tokens
    assert_deltas_make_texts(outputs, steps)


@settings(max_examples=40)
@given(st.lists(works, min_size=1, max_size=5), engines(), st.data())
def test_an_abort_at_any_time_frees_its_blocks_and_harms_no_other(requests, shape, data):
    limits, runner = shape
    running = engine(limits, seed=3, eos=ENDS, **runner)
    for work in requests:
        add(running, work)
    plan = data.draw(st.dictionaries(st.integers(0, 30), st.integers(0, len(requests) - 1), max_size=4))
    outputs, steps = {}, []
    while running.has_work:
        if len(steps) in plan:
            running.abort(str(plan[len(steps)]))
            check_pool(running.scheduler.pool, running.scheduler.running)
        steps.append(running.step())
        outputs |= {(int(o.request_id), o.sample): o for o in steps[-1].finished}
    assert running.scheduler.pool.num_used == 0
    assert len(outputs) == sum(work.params.n for work in requests)
    for i, work in enumerate(requests):
        for sample, full in enumerate(alone(i, work)):
            output = outputs[i, sample]
            if output.finish_reason is FinishReason.ABORT:
                assert i in plan.values()
                assert output.token_ids == full.token_ids[: len(output.token_ids)]
                assert len(output.token_ids) < len(full.token_ids) or work.params.max_tokens == 0
            else:
                assert what(output) == what(full)
    assert_deltas_make_texts(outputs, steps)


@settings(max_examples=30)
@given(st.lists(works, min_size=1, max_size=4), engines())
def test_the_same_requests_come_to_the_same_again_with_all_they_left_in_the_cache(requests, shape):
    limits, runner = shape
    running = engine(limits, seed=3, eos=ENDS, tokenizer=Words(), **runner)
    for _ in range(2):
        for i, work in enumerate(requests):
            running.add_request(work.prompt, work.params, index=i, cache_salt=work.salt)
        outputs, _ = finish(running)
        for i, work in enumerate(requests):
            assert_as_alone(i, work, outputs)
