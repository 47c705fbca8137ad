"""Guesses change how long a text takes, never the text."""

from dataclasses import replace

import numpy as np
import pytest
from engines import check_pool, engine, fake, finish, generate, params_of, what
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.engine.outputs import StepStats
from xinfer.engine.random import derive
from xinfer.engine.speculative import DraftModelProposer, NgramProposer, Speculator
from xinfer.engine.types import Limits, Request, SamplingParams, Sequence, State
from xinfer.testing.fake import EOS

ENDS = [EOS, 257]


class Always(Speculator):
    """Guesses whether it pays or not."""

    def _pays(self, batch):
        return True


class Oracle:
    """Knows what each request will say; proposes that, or what `spoil` makes of it."""

    def __init__(self, texts, spoil=lambda tokens: tokens):
        self.texts, self.spoil = texts, spoil

    def propose(self, sequences, count):
        texts = [(s, self.texts[s.request.index, s.sample]) for s in sequences]
        return [self.spoil(list(text[len(s.output_token_ids) :][:count])) for s, text in texts]

    def forget(self, sequence):
        pass


SPOIL = {
    "right": lambda tokens: tokens,
    "wrong": lambda tokens: [(token + 1) % 260 for token in tokens],
    "half": lambda tokens: [*tokens[:1], *((token + 1) % 260 for token in tokens[1:])],
    "long": lambda tokens: [*tokens, *range(60)],
    "none": lambda tokens: [],
    "odd": lambda tokens: tokens if len(tokens) % 2 else [],
}
sampling = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 2, 3]),
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    seed=st.none() | st.integers(0, 99),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    bad_words=st.sampled_from([(), ("a", "bc")]),
    max_tokens=st.integers(5, 25),
    min_tokens=st.sampled_from([0, 5]),
    stop=st.sampled_from([(), ("a", "bc")]),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 250, 25))]),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, 1]),
)
requests_of = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), sampling), min_size=1, max_size=4
)


@settings(max_examples=80)
@given(requests_of, st.sampled_from(sorted(SPOIL)), st.sampled_from([(4, 12), (16, 4), (16, 40)]), st.integers(1, 6))
def test_texts_are_the_same_with_guesses_of_every_kind(requests, kind, cache, count):
    size, blocks = cache
    expected = {}
    for n, (prompt, params) in enumerate(requests):
        seed = derive(0, n) if params.seed is None else params.seed
        for output in generate(prompt, replace(params, seed=seed), eos=ENDS):
            expected[n, output.sample] = output
    oracle = Oracle({key: output.token_ids for key, output in expected.items()}, SPOIL[kind])
    guessing = Always(oracle, count)
    running = engine(eos=ENDS, speculator=guessing, block_size=size, num_blocks=blocks, max_model_len=48)
    for prompt, params in requests:
        running.add_request(prompt, params)
    outputs, steps = finish(running)
    assert {key: what(output) for key, output in outputs.items()} == {k: what(o) for k, o in expected.items()}
    stats = [step.stats for step in steps]
    assert guessing.proposed == sum(s.draft_tokens for s in stats)
    assert guessing.accepted == sum(s.accepted_tokens for s in stats) <= guessing.proposed
    if kind in ("wrong", "none"):
        assert guessing.accepted == 0
    for s in stats:
        if s.stage == "decode":
            assert s.decode_tokens == s.batch_size + s.draft_tokens
            assert s.generated_tokens == s.batch_size + s.accepted_tokens


def test_right_guesses_save_steps():
    params = params_of(max_tokens=30, ignore_eos=True)
    (alone,) = generate([1, 2], params)
    running = engine(speculator=Always(Oracle({(0, 0): alone.token_ids}), 4))
    running.add_request([1, 2], params)
    outputs, steps = finish(running)
    assert outputs[0, 0].token_ids == alone.token_ids
    assert len(steps) == 1 + -(-29 // 5)
    assert all(step.stats.accepted_tokens == step.stats.draft_tokens for step in steps)
    assert outputs[0, 0].stats.generated_tokens == 30
    assert sum(step.stats.generated_tokens for step in steps) == 30


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 6}, {"max_logits_rows": 4}], ids=str)
def test_guesses_leave_room_for_what_has_to_be_computed(limits):
    limits = Limits(max_num_seqs=4, **limits)
    texts = {(n, 0): (5,) * 99 for n in range(4)}
    running = engine(limits, speculator=Always(Oracle(texts), 5))
    for n in range(4):
        running.add_request([n], params_of(max_tokens=20))
    outputs, steps = finish(running)
    for n in range(4):
        assert outputs[n, 0].token_ids == generate([n], params_of(max_tokens=20, seed=derive(0, n)))[0].token_ids
    going = {0, 1, 2, 3}
    for step in steps:
        assert {token.request.index for token in step.tokens} == going
        going -= {output.index for output in step.finished}


def test_guesses_do_not_keep_those_out_that_wait():
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=4)
    running = engine(limits, speculator=Always(Oracle({(0, 0): (5,) * 99, (1, 0): (5,) * 99}), 9))
    running.add_request([0], params_of(max_tokens=90))
    running.step()
    running.add_request([1] * 3, params_of(max_tokens=3))
    _, steps = finish(running)
    assert [o.index for step in steps for o in step.finished] == [1, 0]


# Looking the text up in itself


def sequence(tokens, prompt=1):
    return Sequence(Request("0", 0, tuple(tokens[:prompt]), SamplingParams(), 0), list(tokens), 999)


def look_up(tokens, count, longest, shortest):
    """What followed the longest end of the text that occurred before, at its last occurrence."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if length < len(tokens) and tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + count]
    return []


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_the_last_place_where_the_texts_end_stood_is_found_however_the_text_grows(pieces, count, longest, shortest):
    proposer, s = NgramProposer(longest, min(longest, shortest)), sequence([])
    for piece in pieces:
        s.token_ids += piece
        assert proposer.propose([s], count) == [look_up(s.token_ids, count, longest, min(longest, shortest))]
    proposer.forget(s)
    proposer.forget(s)
    assert not proposer._follows
    assert not proposer._seen


def test_a_text_that_repeats_its_prompt_is_guessed():
    prompt = [10, 20, 30, 40, 50, 60, 70, 80, 90]
    script = {9 + n: token for n, token in enumerate(prompt * 3)}
    guessing = Always(NgramProposer(), 4)
    running = engine(speculator=guessing, script=script)
    running.add_request(prompt, params_of(max_tokens=27, temperature=0))
    outputs, steps = finish(running)
    assert outputs[0, 0].token_ids == tuple(prompt * 3)
    assert guessing.accepted == guessing.proposed > 15
    assert len(steps) < 10


# A smaller model


def drafted(requests, draft, count=4, limits=None, **options):
    """Run these requests with guesses of a draft model; return results, steps and the proposer."""
    proposer = DraftModelProposer(draft, limits or Limits())
    running = engine(speculator=Always(proposer, count), **options)
    for prompt, params in requests:
        running.add_request(prompt, params)
    outputs, steps = finish(running)
    assert not proposer._shadows
    check_pool(proposer.pool, [])
    for (n, sample), output in outputs.items():
        prompt, params = requests[n]
        expected = generate(prompt, replace(params, seed=derive(0, n)))[sample]
        assert output.token_ids == expected.token_ids
    return outputs, steps, proposer, running.speculator


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9, "n": 3}, {"n": 2, "top_k": 4}], ids=str)
def test_a_draft_model_that_is_the_model_is_always_right(params):
    requests = [([1, 2, 3], params_of(max_tokens=30, **params)), ([4] * 20, params_of(max_tokens=30, **params))]
    _, _, _, guessing = drafted(requests, fake())
    assert guessing.accepted == guessing.proposed > 40


def test_a_draft_model_that_is_another_is_right_less_often():
    other = fake(script=lambda context: 7 if sum(context) % 2 else None)
    _, _, _, guessing = drafted([([1, 2, 3], params_of(max_tokens=60))], other)
    assert 0 < guessing.accepted < guessing.proposed * 0.7


@pytest.mark.parametrize("shape", [(4, 3), (4, 12), (16, 1), (1, 40), (64, 2)])
@pytest.mark.parametrize("budget", [1, 7, 2048])
def test_where_the_drafts_cache_is_full_nothing_is_guessed_and_nothing_leaks(shape, budget):
    size, blocks = shape
    requests = [([n] * (5 + 4 * n), params_of(max_tokens=12, n=1 + n % 2)) for n in range(5)]
    drafted(requests, fake(block_size=size, num_blocks=blocks), limits=Limits(max_num_batched_tokens=budget))


def test_a_draft_model_with_a_shorter_context_guesses_up_to_its_end():
    _, steps, _, _ = drafted([([1] * 10, params_of(max_tokens=60))], fake(max_model_len=40))
    lengths = [step.stats.kv_tokens for step in steps if step.stats.draft_tokens]
    assert 30 < max(lengths) <= 40


def test_after_a_pause_the_draft_model_sees_the_text_as_it_went_on():
    """What it guessed before the pause is wrong in its first place and right in a later one."""
    seen = {1: 5, 2: 6, 3: 7, 4: 8}
    proposer = DraftModelProposer(fake(script=seen), Limits())
    s = sequence([1])
    assert proposer.propose([s], 4) == [[5, 6, 7, 8]]
    s.token_ids += [9, 6, 7, 3]
    (guess,) = proposer.propose([s], 2)
    assert proposer._shadows[s].num_computed == 6
    fresh = DraftModelProposer(fake(script=seen), Limits())
    assert [guess] == fresh.propose([sequence([1, 9, 6, 7, 3])], 2)


def test_an_abort_takes_the_drafts_blocks_back():
    proposer = DraftModelProposer(fake(num_blocks=4), Limits())
    running = engine(speculator=Always(proposer))
    for _ in range(100):
        running.add_request([1] * 20, params_of(max_tokens=30), index=0)
        for _ in range(3):
            running.step()
        assert proposer.pool.num_used > 0
        running.abort("0")
        assert proposer.pool.num_used == 0
        running.step()


# Whether it pays


def decode_step(batch, tokens, milliseconds, drafts=0):
    stats = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    stats |= {"stage": "decode", "batch_size": batch, "generated_tokens": tokens, "step_ms": milliseconds}
    return StepStats(**stats | {"draft_tokens": drafts, "accepted_tokens": max(0, tokens - batch)})


def simulate(batch, steps, guessed, plain, seed=0):
    """The share of steps with guesses, where such a step brings (tokens, ms) and one without brings the other."""

    class Some:
        def propose(self, sequences, count):
            return [[1] * count for _ in sequences]

    rng = np.random.default_rng(seed)
    speculator, running = Speculator(Some(), 4), [sequence([1, 2]) for _ in range(batch)]
    chosen = []
    for s in running:
        s.enter(State.DECODE, 0.0)
        s.num_computed = 1
    for _ in range(steps):
        for s in running:
            s.draft = []
        speculator.propose(running)
        chosen.append(bool(running[0].draft))
        tokens, ms = guessed if chosen[-1] else plain
        speculator.observe(decode_step(batch, tokens, ms * rng.uniform(0.8, 1.2), 4 * batch * chosen[-1]))
    figures = speculator.figures()
    assert figures["decode_steps"] == steps
    assert figures["steps_switched_off"] == steps - sum(chosen)
    assert figures["proposed_tokens"] == 4 * batch * sum(chosen)
    return sum(chosen[20:]) / (steps - 20)


@pytest.mark.parametrize("batch", [1, 2, 5, 16])
def test_guessing_stays_on_where_it_wins_and_off_where_it_loses(batch):
    wins = simulate(batch, 500, (3 * batch, 15.0), (batch, 10.0))
    loses = simulate(batch, 500, (batch, 15.0), (batch, 10.0))
    assert wins > 0.9
    assert loses < 0.1
    assert loses > 0, "what has changed since would never be noticed"


def test_too_many_at_once_are_not_guessed():
    running = engine(speculator=Speculator(NgramProposer(1, 1), max_batch=3), script=lambda context: 7)
    for n in range(4):
        running.add_request([7, 7], params_of(max_tokens=20 if n else 10))
    _, steps = finish(running)
    guessed = {step.stats.batch_size for step in steps if step.stats.draft_tokens}
    assert guessed == {3}
