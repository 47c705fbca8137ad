"""A request's tokens depend on nothing but the request, on runners too whose single tokens take a path of their own."""

import numpy as np
import pytest
import torch
from engines import DEFAULT, VOCAB, engine, fake, finish, params_of, what
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.engine.random import uniform
from xinfer.engine.runner import LEVELS
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError
from xinfer.testing.fake import FakeRunner, context_logits

ALONE = 1000  # added to a token that was computed in a call of single tokens
BOTH = frozenset({"copy", "free", "decode_differs"})


class TwoPaths(FakeRunner):
    """Rounds otherwise where all queries are single tokens, and keeps in the cache which way a token went."""

    def forward(self, batch):
        single = np.diff(batch.query_starts) == 1
        assert single.all() or not single.any(), "single tokens beside the pieces of prompts"
        self._check(batch)
        self._tokens[batch.slot_mapping] = batch.token_ids + ALONE * single.all()
        self._places[batch.slot_mapping] = batch.positions
        lengths = batch.positions[batch.sample_at].astype(np.int64) + 1
        rows = [context_logits(c[:n], VOCAB) for c, n in zip(self._read(batch, lengths), lengths, strict=True)]
        return torch.from_numpy(np.array(rows, np.float32).reshape(-1, VOCAB))


def exact(capabilities=BOTH, **limits):
    """Limits that ask for the same bits always, and what makes the runner."""
    return Limits(**limits, determinism="invariant"), {"kind": TwoPaths, "capabilities": capabilities}


def strict(limits, runner, **options):
    return engine(limits, runner=fake(**(runner | options), max_logits_rows=limits.logits_rows))


def by_hand(prompt, params, sample=0):
    """Generate with the plainest loop: the whole prompt in one call, then one token in each."""
    tokens = list(prompt)
    seen = [token + ALONE * (len(prompt) == 1) for token in prompt]
    for _ in range(params.max_tokens):
        logits = context_logits(seen, VOCAB).astype(np.float64)
        if params.temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            cdf = np.exp((logits - logits.max()) / params.temperature).cumsum()
            u = uniform([params.seed], [len(tokens)], [sample])[0]
            tokens.append(int((cdf > u * cdf[-1]).argmax()))
        seen.append(tokens[-1] + ALONE)
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 9, 16, 33])
def test_prompts_of_every_length_are_cut_into_no_single_tokens(budget):
    running = strict(*exact(max_num_seqs=5, max_num_batched_tokens=budget))
    params = params_of(max_tokens=3, temperature=0)
    prompts = [list(range(length)) for length in range(1, 41)]
    for prompt in prompts:
        running.add_request(prompt, params)
    outputs, steps = finish(running)
    assert [outputs[n, 0].token_ids for n in range(40)] == [by_hand(prompt, params) for prompt in prompts]
    assert sum(step.stats.cached_tokens for step in steps) > 0


def test_a_hit_leaves_two_tokens_of_the_prompt_to_compute():
    running = strict(*exact(), block_size=4, hash_size=4)
    cached = []
    for length in range(1, 20):
        running.add_request(list(range(length)), params_of(max_tokens=6, temperature=0))
        outputs, _ = finish(running)
        cached.append(outputs[length - 1, 0].stats.cached_tokens)
    assert cached == [max(0, length - 2) // 4 * 4 for length in range(1, 20)]


def test_generated_tokens_are_not_taken_from_the_cache_as_a_prompts():
    running = strict(*exact(), block_size=4, hash_size=4)
    params = params_of(max_tokens=12, temperature=0)
    running.add_request([1, 2, 3], params)
    first = finish(running)[0][0, 0].token_ids
    running.add_request([1, 2, 3, *first], params)
    outputs, _ = finish(running)
    assert outputs[1, 0].stats.cached_tokens == 0
    assert outputs[1, 0].token_ids == by_hand([1, 2, 3, *first], params)


heads = st.sampled_from([(), (1,), (1, 2), (1,) * 16, (1, 2) * 9])
works = st.lists(
    st.tuples(
        st.builds(lambda head, tail: head + tuple(tail), heads, st.lists(st.integers(0, 2), min_size=1, max_size=12)),
        st.builds(
            SamplingParams,
            n=st.sampled_from([1, 1, 2, 4]),
            temperature=st.sampled_from([0.0, 1.0]),
            seed=st.integers(0, 9),
            max_tokens=st.integers(0, 20),
            prompt_logprobs=st.sampled_from([None, None, 0]),
        ),
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def tight(draw):
    """Limits and caches, most of them too small for all."""
    size = draw(st.sampled_from([1, 3, 4, 16, 64]))
    needed = -(-50 // size)
    seqs = draw(st.integers(1, 5))
    limits, runner = exact(
        capabilities=draw(st.sampled_from([BOTH, BOTH - {"copy"}])),
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.sampled_from([4, 5, 7, 20, 512])),
        max_logits_rows=draw(st.sampled_from([None, max(seqs, 4)])),
        prefix_cache=draw(st.booleans()),
    )
    blocks = draw(st.integers(needed, 3 * needed))
    return limits, runner | {"block_size": size, "num_blocks": blocks, "hash_size": 4, "max_model_len": 50}


@settings(max_examples=50)
@given(works, tight(), st.data())
def test_a_request_is_what_the_plainest_loop_makes_of_it(requests, shape, data):
    running = strict(*shape)
    late = data.draw(st.integers(0, len(requests)))
    steps = []
    for i, (prompt, params) in enumerate(requests):
        running.add_request(prompt, params)
        steps += [running.step()] if i >= late else []
    outputs, more = finish(running)
    outputs |= {(int(o.request_id), o.sample): o for step in steps for o in step.finished}
    for i, (prompt, params) in enumerate(requests):
        for sample in range(params.n):
            assert outputs[i, sample].token_ids == by_hand(prompt, params, sample)
    reference = strict(*exact(prefix_cache=False))
    for i, (prompt, params) in enumerate(requests):
        reference.add_request(prompt, params)
        alone, _ = finish(reference)
        for sample in range(params.n):
            assert what(outputs[i, sample]) == what(alone[i, sample])
    assert sum(len(step.tokens) for step in steps + more) == sum(len(o.token_ids) for o in outputs.values())


# What is refused


@pytest.mark.parametrize("missing", sorted(LEVELS))
def test_a_runner_that_does_not_promise_it_is_refused_by_what_is_missing(missing):
    limits, runner = exact(capabilities=frozenset({"copy"}))
    made = fake(**runner, levels=LEVELS - {missing})
    with pytest.raises(ConfigError, match=rf"determinism=invariant: the backend does not promise {missing} on cpu"):
        engine(limits, runner=made)
    engine(DEFAULT, runner=made)


@pytest.mark.parametrize(
    ("name", "few"), [("max_num_batched_tokens", {}), ("max_logits_rows", {"max_num_seqs": 2})], ids=["tokens", "rows"]
)
def test_too_few_tokens_to_a_step_to_cut_none_off_are_refused(name, few):
    limits, runner = exact(**few, **{name: 3})
    with pytest.raises(ConfigError, match=rf"engine\.{name}=3 is too few"):
        strict(limits, runner)
    limits, runner = exact(**few, **{name: 4})
    running = strict(limits, runner)
    running.add_request([1, 2, 3, 4, 5], params_of(prompt_logprobs=0, max_tokens=0))
    assert len(finish(running)[0][0, 0].prompt_logprobs) == 5


def test_guessing_is_off_where_generated_tokens_go_one_by_one():
    class Never:
        def propose(self, running):
            raise AssertionError

    limits, runner = exact()
    running = engine(limits, runner=fake(**runner), speculator=Never())
    running.add_request([1, 2], params_of(temperature=0))
    assert finish(running)[0][0, 0].token_ids == by_hand([1, 2], params_of(temperature=0))


# Seeds


@pytest.mark.parametrize("seed", [0, 42, 2**63, 2**64 - 1])
def test_a_seeded_request_is_the_same_in_every_company(seed):
    params = params_of(max_tokens=16, temperature=0.8, seed=seed, ignore_eos=True)
    texts = set()
    for other in ({}, {"seed": 7}, {"seed": seed}, {"temperature": 0}, {"n": 3}, {"presence_penalty": 2}):
        for first in (True, False):
            running = engine(seed=1)
            order = [([1, 2, 3], params), ([4, 5], params_of(**{"max_tokens": 16} | other))]
            for prompt, chosen in order if first else order[::-1]:
                running.add_request(prompt, chosen)
            texts.add(finish(running)[0][0 if first else 1, 0].token_ids)
    assert len(texts) == 1


def test_no_generator_of_the_program_is_used_or_seeded():
    """Case D07."""
    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    running = engine()
    running.add_request([1], params_of(n=3))
    finish(running)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
