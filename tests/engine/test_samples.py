"""Several samples of one prompt: each a text of its own, a function of (seed, i), as if it had been asked for alone."""

from dataclasses import replace

import numpy as np
import pytest
from engines import VOCAB, engine, fake, finish, generate, params_of, what

from xinfer.engine.random import derive, uniform
from xinfer.engine.types import FinishReason, Limits, State
from xinfer.testing.fake import context_logits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def by_hand(prompt, params, sample, seed):
    """Sample `sample` by the documented rule: its draws are those of (seed, position, sample)."""
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        logits = context_logits(tokens, VOCAB).astype(np.float64)
        cdf = np.exp((logits - logits.max()) / params.temperature).cumsum()
        u = uniform([seed], [len(tokens)], [sample])[0]
        tokens.append(int((cdf > u * cdf[-1]).argmax()))
    return tuple(tokens[len(prompt) :])


# D04, D05


@pytest.mark.parametrize("n", [1, 2, 4, 33])
def test_sample_i_is_a_function_of_seed_and_i(n):
    params = params_of(n=n, seed=7)
    for _ in range(2):
        outputs = generate(PROMPT, params)
        assert [o.token_ids for o in outputs] == [by_hand(PROMPT, params, i, 7) for i in range(n)]
    assert len({o.token_ids for o in outputs}) == n
    assert [(o.sample, o.seed, o.stats.sample) for o in outputs] == [(i, 7, i) for i in range(n)]


def test_without_a_seed_samples_follow_the_requests_own():
    running = engine(seed=5)
    for _ in range(2):
        running.add_request(PROMPT, params_of(n=3))
    outputs, _ = finish(running)
    for index in range(2):
        for i in range(3):
            assert outputs[index, i].token_ids == by_hand(PROMPT, params_of(), i, derive(5, index))


@pytest.mark.parametrize("fewer", [1, 2, 5])
def test_more_samples_leave_the_first_ones_as_they_are(fewer):
    many = generate(PROMPT, params_of(n=9, top_p=0.9))
    few = generate(PROMPT, params_of(n=fewer, top_p=0.9))
    assert [what(o) for o in few] == [what(o) for o in many[:fewer]]


def test_greedy_samples_are_all_the_same_text():
    outputs = generate(PROMPT, params_of(n=3, temperature=0))
    assert len({o.token_ids for o in outputs}) == 1


def test_each_sample_streams_its_own_text_and_ends_for_its_own_reason():
    params = params_of(n=4, max_tokens=32, stop=("a", "b", "c"), seed=1)
    running = engine()
    running.add_request([1], params)
    outputs, steps = finish(running)
    deltas = dict.fromkeys(range(4), "")
    for step in steps:
        for token in step.tokens:
            deltas[token.sample] += token.text
    for i, delta in deltas.items():
        output = outputs[0, i]
        assert delta + output.tail == output.text
        assert output.token_ids == by_hand([1], params, i, 1)[: len(output.token_ids)]
        ended = any(chr(token) in "abc" for token in output.token_ids if token < 128)
        assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert (len(output.token_ids) == 32) or ended
    assert len({o.finish_reason for o in outputs.values()}) == 2


# What they share, and where there is not room for all


def test_the_prompt_is_computed_once_and_its_last_block_copied_for_all_but_one():
    running = engine(runner=fake(block_size=4))
    running.add_request(PROMPT, params_of(n=5))
    outputs, steps = finish(running)
    assert sum(step.stats.prefill_tokens for step in steps) == len(PROMPT)
    assert sum(step.stats.copies for step in steps) == 4
    assert [outputs[0, i].stats.cached_tokens for i in range(5)] == [0, *[len(PROMPT)] * 4]
    assert len(steps[0].tokens) == 5
    assert max(step.stats.kv_blocks_used for step in steps) == 2 + 5 * 3  # 20 tokens each, 8 of them shared


@pytest.mark.parametrize("seqs", [1, 2, 3, 7])
@pytest.mark.parametrize("copy", [True, False])
def test_more_samples_than_sequences_of_a_step_take_turns(seqs, copy):
    params = params_of(n=7, logprobs=1)
    limits = Limits(max_num_seqs=seqs, max_logits_rows=seqs)
    running = engine(limits, runner=fake(block_size=4, capabilities=frozenset({"copy"} if copy else ())))
    running.add_request(PROMPT, params)
    outputs, steps = finish(running)
    assert [what(outputs[0, i]) for i in range(7)] == [what(o) for o in generate(PROMPT, params)]
    assert max(step.stats.batch_size for step in steps) == seqs
    waited = [i for i in range(7) if State.PREEMPTED in [state for state, _ in outputs[0, i].history]]
    assert waited == list(range(seqs, 7))


@pytest.mark.parametrize("blocks", [6, 8, 11])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("copy", [True, False])
def test_samples_that_are_put_aside_go_on_as_they_were(blocks, cache, copy):
    params = params_of(n=4, logprobs=1, presence_penalty=1)
    runner = fake(block_size=4, num_blocks=blocks, max_model_len=24, capabilities=frozenset({"copy"} if copy else ()))
    running = engine(Limits(prefix_cache=cache), runner=runner)
    for _ in range(2):
        running.add_request(PROMPT, replace(params, seed=3))
    outputs, steps = finish(running)
    assert sum(step.stats.preemptions for step in steps) >= 2
    for index in range(2):
        for expected in generate(PROMPT, replace(params, seed=3)):
            assert what(outputs[index, expected.sample]) == what(expected)


@pytest.mark.parametrize("budget", [1, 4, 64])
def test_the_prompts_logprobs_come_with_the_first_sample(budget):
    params = params_of(n=3, prompt_logprobs=1)
    outputs = generate(PROMPT, params, limits=Limits(max_num_batched_tokens=budget, max_num_seqs=1))
    alone = generate(PROMPT, params_of(prompt_logprobs=1))[0]
    assert [o.prompt_logprobs for o in outputs] == [alone.prompt_logprobs, None, None]
    assert [o.token_ids for o in outputs] == [by_hand(PROMPT, params, i, 0) for i in range(3)]


def test_samples_of_a_prompt_of_which_nothing_more_is_wanted_end_with_it():
    running = engine(Limits(max_num_seqs=2))
    running.add_request(PROMPT, params_of(n=5, max_tokens=0))
    outputs, steps = finish(running)
    assert len(steps) == 1
    assert {(o.token_ids, o.finish_reason) for o in outputs.values()} == {((), FinishReason.LENGTH)}


# Ends


@pytest.mark.parametrize("moment", range(12))
def test_an_abort_ends_all_samples_before_and_after_they_fork(moment):
    running = engine(Limits(max_num_batched_tokens=4, max_num_seqs=2), block_size=4, num_blocks=12, max_model_len=48)
    running.add_request(PROMPT, params_of(n=4, seed=7))
    running.add_request([1], params_of())
    steps = [running.step() for _ in range(moment)]
    running.abort("0")
    assert running.scheduler.pool.num_used <= 4  # the other's
    outputs, more = finish(running)
    mine = [o for step in [*steps, *more] for o in step.finished if o.index == 0]
    assert sorted(o.sample for o in mine) == [0, 1, 2, 3]
    for o in mine:
        assert o.finish_reason is FinishReason.ABORT
        assert o.token_ids == by_hand(PROMPT, params_of(), o.sample, 7)[: len(o.token_ids)]
    assert what(outputs[1, 0]) == what(generate([1], params_of(seed=derive(0, 1)))[0])


def test_a_step_that_ends_one_sample_leaves_the_others_going():
    params = params_of(n=6, max_tokens=40, stop_token_ids=tuple(range(0, 250, 9)), seed=4)
    running = engine(block_size=4)
    running.add_request(PROMPT, params)
    outputs, _ = finish(running)
    lengths = set()
    for i in range(6):
        whole = by_hand(PROMPT, params, i, 4)
        end = next((n for n, token in enumerate(whole, start=1) if token % 9 == 0 and token < 250), 40)
        assert outputs[0, i].token_ids == whole[:end]
        lengths.add(end)
    assert len(lengths) > 3


@pytest.mark.parametrize("where", [len(PROMPT), len(PROMPT) + 2])
def test_a_row_that_is_not_finite_ends_only_the_samples_that_meet_it(where):
    params = params_of(n=3, seed=7)
    whole = [by_hand(PROMPT, params, i, 7) for i in range(3)]
    bad = [*PROMPT, *whole[1]][:where]
    outputs = generate(PROMPT, params, nan_rows=lambda context: context == bad)
    met = [where == len(PROMPT) or i == 1 for i in range(3)]
    assert [o.finish_reason is FinishReason.ERROR for o in outputs] == met
    for o, tokens, broken in zip(outputs, whole, met, strict=True):
        assert o.token_ids == (tokens[: where - len(PROMPT)] if broken else tokens)
