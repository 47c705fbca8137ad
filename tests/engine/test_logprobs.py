"""A token's logprob, rank and likelier neighbours are those of its row, whatever else a step computes."""

import math

import pytest
import torch
from engines import VOCAB, engine, finish, generate, params_of
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.engine.logprobs import MODES, describe
from xinfer.engine.types import FinishReason, Limits, State
from xinfer.errors import ConfigError
from xinfer.testing.fake import FakeRunner, context_logits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
INF = math.inf


def row_of(context):
    return torch.from_numpy(context_logits(context, VOCAB))


def expected(values, token, top):
    """A token's entry by sorting the whole row."""
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    rank = 1 + sum(value > values[token] for value in values)
    return token, values[token], rank, tuple((t, values[t]) for t in order[:top] if values[t] > -INF)


def entry(told):
    return told.token_id, told.logprob, told.rank, told.top


def filtered(row, p):
    """What a token is drawn from: the row after penalties-free temperature and filters, the rest minus infinity."""
    if p.temperature == 0:
        return row
    scaled = (row.double() / p.temperature).float()
    order = sorted(range(VOCAB), key=lambda t: (-row[t].item(), t))
    weights = (row.double() - row.max()).div(p.temperature).exp().tolist()
    kept = [t for t in order if weights[t] >= p.min_p][: p.top_k or VOCAB]
    if p.top_p < 1:
        whole, mass, enough = sum(weights[t] for t in kept), 0.0, []
        for t in kept:
            if mass >= p.top_p * whole:
                break
            mass += weights[t]
            enough.append(t)
        kept = enough
    out = torch.full((VOCAB,), -INF)
    out[kept] = scaled[kept]
    return out


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB, 10**9])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_logprobs_are_the_models_own_after_each_context(top, temperature):
    (output,) = generate(PROMPT, params_of(logprobs=top, temperature=temperature, top_k=7))
    context = list(PROMPT)
    for token, told in zip(output.token_ids, output.logprobs, strict=True):
        assert entry(told) == expected(torch.log_softmax(row_of(context), 0).tolist(), token, top)
        context.append(token)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 2}],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_tells_of_the_row_it_names(mode, params):
    params = params_of(logprobs=12, prompt_logprobs=2, **params)
    (output,) = generate(PROMPT, params, logprobs_mode=mode)
    context = list(PROMPT)
    for token, told in zip(output.token_ids, output.logprobs, strict=True):
        row = row_of(context)
        row = filtered(row, params) if mode.startswith("processed") else row
        values = (torch.log_softmax(row, 0) if mode.endswith("logprobs") else row).tolist()
        assert told.logprob > -INF
        assert (told.token_id, told.rank) == (token, expected(values, token, 0)[2])
        assert [t for t, _ in told.top] == [t for t, _ in expected(values, token, 12)[3]]
        close = pytest.approx([told.logprob, *(value for _, value in told.top)], rel=1e-6)
        assert [values[token], *(value for _, value in expected(values, token, 12)[3])] == close
        context.append(token)


def test_processed_logprobs_tell_of_penalties_and_raw_ones_do_not():
    params = {"logprobs": 3, "temperature": 0, "logit_bias": {7: 100.0}}
    raw, processed = (
        generate(PROMPT, params_of(**params), logprobs_mode=mode)[0].logprobs[0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert entry(raw)[:3] == expected(torch.log_softmax(row_of(PROMPT), 0).tolist(), 7, 0)[:3]
    assert (processed.rank, processed.logprob) == (1, pytest.approx(0, abs=1e-6))


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"logprobs_mode='raw' is unknown.*processed_logits"):
        engine(logprobs_mode="raw")


values = st.lists(st.sampled_from([-INF, -2.0, -1.0, 0.0, 1.0]) | st.floats(-5, 5, width=32), min_size=7, max_size=7)


@settings(max_examples=150)
@given(st.lists(st.tuples(values, st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=5))
def test_ranks_and_the_likeliest_are_those_of_the_sorted_row_with_equals_by_id(rows):
    table = torch.tensor([row for row, _, _ in rows], dtype=torch.float32)
    told = describe(table, [token for _, token, _ in rows], [top for _, _, top in rows])
    for line, (_, token, top), row in zip(told, rows, table.tolist(), strict=True):
        assert entry(line) == expected(row, token, top)


# Prompts


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 10, 11, 12, 2048])
@pytest.mark.parametrize("rows", [1, 2, 3, 10, 11, None])
def test_a_prompts_logprobs_are_the_same_however_it_is_cut(budget, rows):
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=budget, max_logits_rows=rows)
    (output,) = generate(PROMPT, params_of(prompt_logprobs=2, max_tokens=3), limits=limits)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    for place, told in enumerate(output.prompt_logprobs[1:], start=1):
        row = torch.log_softmax(row_of(PROMPT[:place]), 0).tolist()
        assert entry(told) == expected(row, PROMPT[place], 2)
    assert output.token_ids == generate(PROMPT, params_of(max_tokens=3))[0].token_ids


def test_a_prompt_may_be_scored_and_nothing_generated():
    """Case T16."""
    for prompt in ([5], PROMPT):
        (output,) = generate(prompt, params_of(prompt_logprobs=1, max_tokens=0, logprobs=1))
        assert (output.token_ids, output.text, output.logprobs) == ((), "", ())
        assert (output.finish_reason, output.error) == (FinishReason.LENGTH, None)
        assert [told and told.token_id for told in output.prompt_logprobs] == [None, *prompt[1:]]
    (output,) = generate(PROMPT, params_of(max_tokens=0))
    assert (output.finish_reason, output.prompt_logprobs, output.stats.generated_tokens) == ("length", None, 0)


@pytest.mark.parametrize("budget", [4, 2048])
def test_logprobs_survive_being_put_aside(budget):
    limits = Limits(max_num_batched_tokens=budget)
    tight = engine(limits, block_size=4, num_blocks=16, max_model_len=64)
    params = params_of(max_tokens=40, logprobs=2, prompt_logprobs=2)
    prompts = [[n] * (12 + n) for n in range(4)]
    for prompt in prompts:
        tight.add_request(prompt, params)
    outputs, steps = finish(tight)
    assert sum(step.stats.preemptions for step in steps) >= 2
    for n, prompt in enumerate(prompts):
        context = list(prompt)
        for token, told in zip(outputs[n, 0].token_ids, outputs[n, 0].logprobs, strict=True):
            assert entry(told) == expected(torch.log_softmax(row_of(context), 0).tolist(), token, 2)
            context.append(token)
        told = outputs[n, 0].prompt_logprobs[1:]
        for place, one in enumerate(told, start=1):
            row = torch.log_softmax(row_of(prompt[:place]), 0).tolist()
            assert entry(one) == expected(row, prompt[place], 2)


def test_a_prompt_put_aside_while_it_is_scored_is_scored_once():
    running = engine(Limits(max_num_batched_tokens=4, max_num_seqs=1, policy="priority"))
    running.add_request(PROMPT, params_of(prompt_logprobs=1), priority=5)
    running.step()
    running.add_request([1], params_of())
    outputs, _ = finish(running)
    assert State.PREEMPTED in [state for state, _ in outputs[0, 0].history]
    assert outputs[0, 0].prompt_logprobs == generate(PROMPT, params_of(prompt_logprobs=1))[0].prompt_logprobs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [1, 5, 10])
@pytest.mark.parametrize("columns", [slice(None), slice(7, 8)], ids=["all", "one"])
def test_a_prompt_whose_rows_are_not_finite_is_an_error_and_tells_no_numbers(mode, place, columns):
    class Broken(FakeRunner):
        def _alter(self, row, context):
            if context == PROMPT[:place]:
                row[columns] = math.nan

    running = engine(logprobs_mode=mode, kind=Broken, script={})
    running.add_request(PROMPT, params_of(prompt_logprobs=1))
    running.add_request(PROMPT, params_of())
    outputs, _ = finish(running)
    assert (outputs[0, 0].finish_reason, outputs[0, 0].token_ids) == (FinishReason.ERROR, ())
    assert "not finite" in outputs[0, 0].error
    assert outputs[0, 0].prompt_logprobs is None
    assert outputs[1, 0].error is None


# A row's values do not depend on who shares the step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "params", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"presence_penalty": 1}], ids=str
)
def test_logprobs_are_equal_to_the_last_bit_whatever_the_batch(mode, params):
    params = params_of(logprobs=4, seed=3, max_tokens=4, prompt_logprobs=4, **params)
    alone = generate(PROMPT, params, logprobs_mode=mode)[0]
    for mates in (1, 2, 6, 30):
        running = engine(Limits(prefix_cache=False), logprobs_mode=mode)
        for n in range(mates):
            running.add_request([n], params_of(logprobs=n, max_tokens=1 + n % 5, top_k=n))
        running.add_request(PROMPT, params)
        together = finish(running)[0][mates, 0]
        assert (together.logprobs, together.prompt_logprobs) == (alone.logprobs, alone.prompt_logprobs)


def test_logprobs_do_not_change_what_is_drawn():
    plain = generate(PROMPT, params_of(top_p=0.8, n=3))
    told = generate(PROMPT, params_of(top_p=0.8, n=3, logprobs=5, prompt_logprobs=1))
    assert [o.token_ids for o in told] == [o.token_ids for o in plain]
    assert [o.logprobs is None for o in plain] == [True] * 3
