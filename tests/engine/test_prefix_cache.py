"""What the cache gives is what computing would give, and the figures say how much it was."""

from itertools import pairwise

import pytest
from engines import Words, engine, fake, finish, generate, params_of, what

from xinfer.engine.outputs import StepOutput
from xinfer.engine.types import FinishReason, Limits, State

SIZES = [1, 2, 3, 8, 16, 64, 512]


def ask(running, prompt, params, **options):
    """The samples of one more request, on an engine that goes on living, and its steps."""
    index = running.add_request(prompt, params, **options).index
    outputs, steps = finish(running)
    return [outputs[index, sample] for sample in range(params.n)], steps


def cold(prompt, params, seed):
    return generate(prompt, params, limits=Limits(prefix_cache=False), seed=seed)


# V08


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_prompt_that_is_cached_as_a_whole_is_computed_from_its_last_token_on(temperature):
    running = engine(block_size=4, hash_size=4)
    params = params_of(temperature=temperature, seed=7, logprobs=2)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    cached = []
    for asked in (prompt, prompt, [*prompt, 1], prompt[:7], prompt[:4], prompt[:5]):
        (output,), steps = ask(running, asked, params)
        assert what(output) == what(generate(asked, params)[0])
        cached.append(output.stats.cached_tokens)
        assert sum(step.stats.prefill_tokens for step in steps) == len(asked) - cached[-1]
        assert sum(step.stats.cached_tokens for step in steps) == cached[-1]
        assert output.stats.prompt_tokens == len(asked)
    assert cached == [0, 4, 8, 4, 0, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("copy", [True, False])
def test_tokens_and_logprobs_are_the_same_with_the_cache_on_and_off(size, copy):
    capabilities = frozenset({"copy"} if copy else ())
    running = engine(block_size=size, num_blocks=max(16, 2048 // size), hash_size=8, capabilities=capabilities)
    params, prompt, found = params_of(n=2, seed=3, logprobs=1, max_tokens=20), list(range(40)), []
    for length in (40, 40, 33, 39, 8, 9, 40):
        (first, second), _ = ask(running, prompt[:length], params)
        assert [what(first), what(second)] == [what(o) for o in cold(prompt[:length], params, 0)]
        found.append(first.stats.cached_tokens)
        assert second.stats.cached_tokens == length  # the first sample computed it
    grain = 8 if size in (1, 2, 8, 16, 64, 512) else 9
    step = max(grain, size) if not copy else grain
    assert found == [0, *((length - 1) // step * step for length in (40, 33, 39, 8, 9, 40))]


def test_an_answer_is_part_of_the_next_turns_prompt():
    running = engine(hash_size=4, block_size=4)
    (first,), _ = ask(running, [1] * 10, params_of(max_tokens=20))
    prompt = [*first.prompt_token_ids, *first.token_ids, 3, 4]
    (second,), steps = ask(running, prompt, params_of(max_tokens=5))
    assert second.stats.cached_tokens == 28  # the 29 that were computed, in whole chunks
    assert steps[0].stats.kv_cache_miss_rate == pytest.approx(1 - 28 / 31)
    assert what(second) == what(generate(prompt, params_of(max_tokens=5, seed=second.seed))[0])


def test_a_salt_keeps_requests_apart():
    running = engine()
    found = []
    for salt in ("", "a", "a", "b", ""):
        (output,), _ = ask(running, [1] * 40, params_of(), cache_salt=salt)
        found.append(output.stats.cached_tokens)
    assert found == [0, 0, 32, 0, 32]


def test_requests_that_begin_alike_share_blocks_while_they_run():
    prompt = [1] * 64
    running = engine(Limits(max_num_seqs=8), block_size=16, num_blocks=20, max_model_len=80)
    running.add_request(prompt, params_of(max_tokens=16))
    running.step()
    for _ in range(7):
        running.add_request(prompt, params_of(max_tokens=16))
    outputs, steps = finish(running)
    assert sum(step.stats.preemptions for step in steps) == 0
    assert max(step.stats.kv_blocks_used for step in steps) <= 3 + 2 * 8
    assert [outputs[n, 0].stats.cached_tokens for n in range(8)] == [0] + [48] * 7


def test_what_was_aborted_within_its_prompt_leaves_what_it_had_computed():
    running = engine(Limits(max_num_batched_tokens=16), hash_size=16)
    running.add_request([1] * 64, params_of())
    running.step()
    running.step()
    running.abort("0")
    (output,), _ = ask(running, [1] * 64, params_of(seed=1))
    assert output.stats.cached_tokens == 32
    assert what(output) == what(generate([1] * 64, params_of(seed=1))[0])


def test_a_block_freed_and_known_again_within_a_step_keeps_its_keys():
    running = engine(block_size=16, num_blocks=4, max_model_len=64)
    running.add_request([9] * 8, params_of())
    running.step()
    running.abort("0")  # its block is told to be free in the next step, in which another takes it and ends
    prompt = list(range(17))
    ask(running, prompt, params_of(max_tokens=1))
    (output,), _ = ask(running, prompt, params_of(max_tokens=9, seed=1))
    assert output.stats.cached_tokens == 16
    assert output.token_ids == generate(prompt, params_of(max_tokens=9, seed=1))[0].token_ids


# V11


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65])
@pytest.mark.parametrize("size", [8, 32])
def test_a_prompts_logprobs_are_the_cold_ones_though_it_is_cached(length, size):
    running = engine(block_size=size, hash_size=8)
    params, prompt = params_of(prompt_logprobs=1, temperature=0), list(range(length))
    expected = what(cold(prompt, params, 0)[0])[:-1]
    for scored in (True, True, False, True):
        chosen = params if scored else params_of(temperature=0)
        (output,), _ = ask(running, prompt, chosen)
        if scored:
            assert what(output)[:-1] == expected
        assert output.stats.cached_tokens == (0 if scored else (length - 1) // 8 * 8)


# V05: whoever leaves, at whatever moment


@pytest.mark.parametrize("cache", [True, False])
def test_a_hundred_requests_that_leave_at_every_moment_leave_nothing(cache):
    limits = Limits(max_num_batched_tokens=8, prefix_cache=cache)
    running = engine(limits, block_size=4, num_blocks=24, max_model_len=64, tokenizer=Words())
    for moment in range(100):
        for index in range(4):
            params = params_of(max_tokens=30, n=1 + index % 3, prompt_logprobs=0 if index == 3 else None)
            running.add_request([moment % 7] * (5 + 3 * index), params, index=index)
        for _ in range(moment % 50):
            running.step()
        for index in range(4):
            running.abort(str(index))
            running.abort(str(index))
        assert running.scheduler.pool.num_free == 24
        assert not running.scheduler.has_work
        ended = running.step() if running.has_work else None
        assert isinstance(ended, StepOutput) or moment % 50 > 30
    params = params_of(seed=4, n=3)
    assert [what(o) for o in ask(running, [3] * 9, params, index=9)[0]] == [what(o) for o in generate([3] * 9, params)]


# V07: put aside, with everything that depends on what came before


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"n": 2}], ids=str)
@pytest.mark.parametrize("cache", [True, False])
def test_what_was_put_aside_has_the_tokens_and_figures_of_one_that_was_not(params, cache):
    params = params_of(
        max_tokens=40,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logprobs=2,
        bad_words=("a", "bc"),
        min_tokens=9,
        seed=2,
        **params,
    )
    limits = Limits(prefix_cache=cache)
    tight = engine(limits, block_size=4, num_blocks=16, max_model_len=64)
    prompts = [[n] * (5 + n) for n in range(4)]
    for prompt in prompts:
        tight.add_request(prompt, params)
    outputs, steps = finish(tight)
    aside = [o for o in outputs.values() if State.PREEMPTED in [state for state, _ in o.history]]
    assert len(aside) >= 2
    assert sum(step.stats.preemptions for step in steps) >= 2
    for n, prompt in enumerate(prompts):
        for expected in generate(prompt, params):
            output = outputs[n, expected.sample]
            assert what(output) == what(expected)
            assert (output.stats.prompt_tokens, output.stats.generated_tokens) == (len(prompt), 40)
            assert output.stats.cached_tokens == (0 if expected.sample == 0 else len(prompt))
            assert len(output.token_times) == 40
            assert all(a <= b for a, b in pairwise(output.token_times))
            assert output.finish_reason is FinishReason.LENGTH


def test_of_what_was_put_aside_only_what_is_gone_is_computed_again():
    running = engine(Limits(max_num_seqs=1, policy="priority"), runner=fake(block_size=4, hash_size=4))
    running.add_request([1] * 40, params_of(max_tokens=30), priority=3)
    for _ in range(10):
        running.step()
    running.add_request([2] * 4, params_of(max_tokens=1), priority=0)
    steps = finish(running)[1]
    again = sum(step.stats.prefill_tokens for step in steps) - 4
    assert again == 50 - 48  # of the 49 tokens that were in the cache 48 are whole chunks
