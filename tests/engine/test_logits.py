"""Penalties, bias and masks are their formulas, row by row; what they leave nothing of is an error, never a token."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import VOCAB, Words, engine, finish, generate, params_of, what
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from xinfer.engine.admission import Admission
from xinfer.engine.logits import adjust
from xinfer.engine.random import derive
from xinfer.engine.sampler import Sampler
from xinfer.engine.types import FinishReason, SamplingParams
from xinfer.errors import RequestError
from xinfer.testing.fake import EOS

WIDTH = 12
INF = math.inf


class Letters:
    """A tokenizer that writes a digit as its token."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(str(token % 10) for token in token_ids)

    def encode_words(self, text):
        return [int(letter, 16) for letter in text.strip()]


def asking(prompt, output=(), eos=(), **params):
    """A sequence with this prompt and this output."""
    admission = Admission(Letters(), (), WIDTH, eos, 0)
    return admission.sequence(prompt, SamplingParams(max_tokens=50, **params), 100, index=0, output_token_ids=output)


def by_formula(row, s):
    """The row as the parameters' definitions change it, in plain numbers."""
    p, output, row = s.request.params, s.output_token_ids, list(row)
    for token in set(s.token_ids):
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token in set(output):
        row[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in p.logit_bias.items():
        row[token] += bias
    forbidden = set() if p.allowed_token_ids is None else set(range(WIDTH)) - set(p.allowed_token_ids)
    for word in p.bad_words:
        *before, last = (int(letter, 16) for letter in word)
        if output[len(output) - len(before) :] == before:
            forbidden.add(last)
    if len(output) < p.min_tokens:
        forbidden |= set(s.request.eos_token_ids) | set(p.stop_token_ids)
    return [-INF if token in forbidden else value for token, value in enumerate(row)]


ids = st.integers(0, WIDTH - 1)
askings = st.builds(
    asking,
    prompt=st.lists(ids, min_size=1, max_size=6),
    output=st.lists(st.integers(0, 3) | ids, max_size=8),
    eos=st.sampled_from([(), (0,), (0, 3)]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.1]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 3.0, 100.0]), max_size=3),
    allowed_token_ids=st.none() | st.just((1, 2, 5, 7, 11)),
    bad_words=st.lists(st.sampled_from(["b", "1", "12", "33", "0123", "a"]), max_size=3),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.sampled_from([(), (7,), (99,)]),
)
numbers = st.lists(st.floats(-8, 8, width=32), min_size=WIDTH, max_size=WIDTH)


@settings(max_examples=150)
@given(st.lists(st.tuples(numbers, askings), min_size=1, max_size=5))
def test_each_row_is_what_the_formulas_make_of_it_whatever_its_mates(pairs):
    rows, sequences = torch.tensor([row for row, _ in pairs]), [s for _, s in pairs]
    before = rows.clone()
    together = adjust(rows, sequences)
    assert torch.equal(rows, before), "the model's own rows are changed"
    for n, s in enumerate(sequences):
        assert together[n].tolist() == pytest.approx(by_formula(rows[n].tolist(), s), rel=1e-5, abs=1e-5)
        assert torch.equal(together[n], adjust(rows[n : n + 1], [s])[0])


def test_where_nobody_asks_nothing_is_copied():
    rows = torch.zeros(2, WIDTH)
    assert adjust(rows, [asking([1]), asking([2], stop_token_ids=(3,))]) is rows


# The same as transformers, where it has the same


def of_transformers(processor, row, s):
    return processor(torch.tensor([s.token_ids]), torch.tensor([row]).clone())[0]


outputs = st.lists(st.integers(0, 4), max_size=9)


@settings(max_examples=50)
@given(numbers, outputs)
def test_penalties_bias_and_masks_are_those_of_transformers(row, output):
    tensor = torch.tensor
    cases = [
        (hf.RepetitionPenaltyLogitsProcessor(1.3), {"repetition_penalty": 1.3}),
        (hf.RepetitionPenaltyLogitsProcessor(0.7), {"repetition_penalty": 0.7}),
        (hf.NoBadWordsLogitsProcessor([[3], [1, 2], [4, 4, 4]]), {"bad_words": ("3", "12", "444")}),
        (hf.SequenceBiasLogitsProcessor([[[2], 1.5], [[6], -9.0]]), {"logit_bias": {2: 1.5, 6: -9.0}}),
        (hf.MinNewTokensLengthLogitsProcessor(1, 4, tensor([0, 5])), {"min_tokens": 4, "eos": (0, 5)}),
        (hf.SuppressTokensLogitsProcessor(list(range(2, WIDTH))), {"allowed_token_ids": (0, 1)}),
    ]
    for processor, params in cases:
        s = asking([9], output, **params)
        torch.testing.assert_close(adjust(tensor([row]), [s])[0], of_transformers(processor, row, s))


# S07, and which tokens a penalty sees


def test_at_the_first_token_only_the_repetition_penalty_sees_the_prompt():
    row = torch.tensor([[2.0, -1.0, 0.5]])
    s = asking([0, 1, 0, 1], presence_penalty=2, frequency_penalty=2)
    assert torch.equal(adjust(row, [s]), row)
    s = asking([0, 1, 0, 1], presence_penalty=2, frequency_penalty=2, repetition_penalty=1.3)
    assert adjust(row, [s])[0].tolist() == pytest.approx([2 / 1.3, -1.3, 0.5])


def test_a_frequency_penalty_counts_and_a_presence_penalty_does_not():
    row = torch.zeros(1, 4)
    assert adjust(row, [asking([3], [0, 0, 0, 1], frequency_penalty=0.5)])[0].tolist() == [-1.5, -0.5, 0, 0]
    assert adjust(row, [asking([3], [0, 0, 0, 1], presence_penalty=0.5)])[0].tolist() == [-0.5, -0.5, 0, 0]


# S08: bias


@pytest.mark.parametrize("key", ["5", 5, np.int64(5)])
def test_a_bias_may_name_its_token_as_json_does(key):
    (output,) = generate([1], params_of(logit_bias={key: 100}, max_tokens=4))
    assert output.token_ids == (5, 5, 5, 5)
    assert json.dumps(dict(output.params.logit_bias)) == '{"5": 100.0}'


@pytest.mark.parametrize("bias", [{}, None])
def test_no_bias_changes_nothing(bias):
    assert generate([1], params_of(logit_bias=bias))[0].token_ids == generate([1], params_of())[0].token_ids


@pytest.mark.parametrize("token", ["191222", 99999, VOCAB])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused_by_name(name, token):
    running = engine()
    value = {token: -100} if name == "logit_bias" else [int(token)]
    with pytest.raises(RequestError, match=rf"{name} names token {token}\b.*{VOCAB}"):
        running.add_request([1], params_of(**{name: value}))
    assert not running.has_work


# S10: nothing is left


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]},
        {"allowed_token_ids": [EOS, 67], "min_tokens": 1, "stop_token_ids": [67]},
        {"allowed_token_ids": [97, EOS], "min_tokens": 1, "bad_words": ["a"]},
    ],
)
def test_masks_that_leave_nothing_are_refused(params):
    running = engine(eos=[EOS])
    with pytest.raises(RequestError, match="forbid every token that allowed_token_ids allows"):
        running.add_request([1], params_of(**params))


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"n": 3}], ids=str)
def test_a_row_of_which_nothing_is_left_later_ends_its_request_and_no_other(params):
    running = engine()
    stuck = params_of(allowed_token_ids=[97], bad_words=["aaa"], logprobs=1, **params)
    free = params_of(**params)
    for chosen in (free, stuck, free):
        running.add_request([1, 2], chosen)
    outputs, _ = finish(running)
    for sample in range(stuck.n):
        output = outputs[1, sample]
        assert (output.token_ids, output.finish_reason) == ((97, 97), FinishReason.ERROR)
        assert output.error.startswith("no token is left")
        assert len(output.logprobs) == 2
        for n in (0, 2):
            alone = generate([1, 2], replace(free, seed=derive(0, n)))[sample]
            assert outputs[n, sample].token_ids == alone.token_ids


# S11: a tokenizer with more tokens than the model has rows, and the other way round


class More(Words):
    max_token_id = VOCAB + 4

    def encode_words(self, text):
        return [VOCAB + 3] if text.strip() == "new" else super().encode_words(text)


def test_a_bad_word_beyond_the_models_rows_can_not_come_and_harms_nobody():
    running = engine(tokenizer=More())
    for words in ((), ("new", "a"), ("new",)):
        running.add_request([1], params_of(bad_words=words, seed=5, max_tokens=30))
    outputs, _ = finish(running)
    assert outputs[0, 0].token_ids == generate([1], params_of(seed=5, max_tokens=30))[0].token_ids
    assert outputs[2, 0].token_ids == outputs[0, 0].token_ids
    assert what(outputs[1, 0]) == what(generate([1], params_of(bad_words="a", seed=5, max_tokens=30))[0])


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 5}, {"repetition_penalty": 1.5}], ids=str)
def test_rows_wider_than_the_vocabulary_bring_no_token_that_is_none(params):
    (padded,) = generate([1], params_of(max_tokens=60, **params), vocab_size=VOCAB * 4)
    assert max(padded.token_ids) < VOCAB
    with pytest.raises(RequestError, match=f"vocabulary has {VOCAB}"):
        generate([1], params_of(logit_bias={VOCAB: 1}), vocab_size=VOCAB * 4)


# S13: rows that are not finite, where masks would hide it


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": (1, 2)}, {"bad_words": ("5",)}, {"min_tokens": 1, "stop_token_ids": (5,)}], ids=str
)
def test_a_mask_does_not_hide_that_a_row_is_not_finite(params, bad):
    row = [0.0] * WIDTH
    rows = torch.tensor([row, [*row[:5], bad, *row[6:]]])
    good, broken = Sampler()(rows, [asking([1], logprobs=2, **params), asking([1], logprobs=2, **params)])
    assert good.error is None
    assert (broken.token_id, broken.logprobs) == (-1, None)
    assert "not finite" in broken.error


# T14: the least number of tokens


@pytest.mark.parametrize("least", [1, 5, 12])
@pytest.mark.parametrize(("end", "params"), [(257, {}), (66, {"stop_token_ids": (66,)})])
def test_no_end_comes_before_the_least_number_of_tokens(least, end, params):
    ends = {EOS, 257, end}
    (output,) = generate(
        [65], params_of(min_tokens=least, **params), eos=[EOS, 257], script=dict.fromkeys(range(99), end)
    )
    assert len(output.token_ids) == min(12, least + 1)
    assert not set(output.token_ids[:least]) & ends
    assert least == 12 or (output.token_ids[-1], output.finish_reason) == (end, FinishReason.STOP)


@pytest.mark.parametrize("least", [0, 1, 2, 3, 4, 6])
def test_a_stop_string_counts_from_the_least_number_of_tokens_on(least):
    script = dict(enumerate(b"abcabcabc", start=1))
    (output,) = generate([65], params_of(stop="abc", min_tokens=least, max_tokens=9), script=script)
    end = next(n for n in (3, 6, 9) if n >= least)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("abcabc"[: end - 3], FinishReason.STOP, end)


def test_all_tokens_come_where_as_many_are_wanted_at_least_as_at_most():
    params = params_of(stop="\n", min_tokens=200, max_tokens=200)
    (output,) = generate([65], params, script=lambda context: 10)
    assert len(output.token_ids) == 200


def test_a_stop_string_that_was_complete_too_early_ends_nothing_later():
    script = dict(enumerate(b"abcX...", start=1))
    (output,) = generate([65], params_of(stop=("abcd", "bc"), min_tokens=4, max_tokens=7), script=script)
    assert (output.text, output.finish_reason) == ("abcX...", FinishReason.LENGTH)


@pytest.mark.parametrize("most", [None, 20])
def test_more_tokens_at_least_than_can_come_are_refused(most):
    with pytest.raises(RequestError, match="min_tokens=30"):
        generate([65] * 10, params_of(min_tokens=30, max_tokens=most), max_model_len=32)
