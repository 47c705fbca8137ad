"""What a request may say: every value out of range is refused by name, before it can cost anybody anything."""

import json
import math

import numpy as np
import pytest
from engines import engine, finish, generate, params_of

from xinfer.engine.sampler import effective
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError, RequestError

INF, NAN = math.inf, math.nan
NOT_NUMBERS = ("1", None, True, NAN, [1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, -1, 1025, 1.5, *NOT_NUMBERS)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, INF, *NOT_NUMBERS)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, -INF, *NOT_NUMBERS)),
        *(("repetition_penalty", value) for value in (0, 0.009, 101, -1, INF, *NOT_NUMBERS)),
        *(("min_tokens", value) for value in (-1, 1.5, 17, *NOT_NUMBERS)),
        *(("logprobs", value) for value in (-1, 1.5, "1", True, NAN)),
        *(("prompt_logprobs", value) for value in (-1, 1.5, "1", False, NAN)),
        *(("allowed_token_ids", value) for value in ([], [-1], ["1"], [1.5], [True], 5, "5", b"5", {1: 1})),
        *(("bad_words", value) for value in ("", [""], ["a", ""], [1], None, 5, b"ab")),
        *(("extra", value) for value in (None, [], "a", 5)),
        *(("logit_bias", value) for value in ([], "a", 5, [[1, 2]])),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name}="):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        *(({key: 1}, repr(key)) for key in ("abc", "", "-1", "1.5", "٣", " 1", -1, 1.5, True, None, "9" * 5000)),
        *(({"5": value}, r"logit_bias\[5\]") for value in (1e9, 100.1, -100.1, NAN, INF, "1", None, True)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bias_that_is_none_is_refused_by_key(bias, named):
    with pytest.raises(RequestError, match="logit_bias") as caught:
        SamplingParams(logit_bias=bias)
    assert named.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"n": 1024},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"logit_bias": {"0": 100, 259: -100}},
        {"min_tokens": 0, "max_tokens": 0},
        {"min_tokens": 16},
        {"min_tokens": 10**6, "max_tokens": None},
        {"logprobs": 0, "prompt_logprobs": 10**12},
        {"bad_words": "text", "stop": "text"},
        {"allowed_token_ids": (0,)},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_in_them(params):
    taken = SamplingParams(**params)
    for name, value in params.items():
        if not isinstance(value, dict | str):
            assert getattr(taken, name) == value


def test_numbers_of_numpy_become_plain_ones_that_records_can_hold():
    params = SamplingParams(
        n=np.int64(2),
        presence_penalty=np.float32(0.5),
        repetition_penalty=np.float64(1.5),
        min_tokens=np.int32(1),
        logprobs=np.uint8(3),
        allowed_token_ids=np.array([1, 2]),
        logit_bias={np.int64(4): np.float32(0.25)},
    )
    plain = [params.n, params.presence_penalty, params.repetition_penalty, params.logprobs, params.allowed_token_ids]
    assert json.dumps([*plain, params.logit_bias]) == '[2, 0.5, 1.5, 3, [1, 2], {"4": 0.25}]'


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, np.int64(3)])
def test_every_seed_is_one_and_none_is_the_runs(seed):
    """D01: zero is a seed like any other, and the largest one kills nobody."""
    assert generate([1], params_of(seed=seed), seed=9)[0].seed == seed
    assert generate([1], params_of(seed=None), seed=9)[0].seed == 9
    assert generate([1], params_of(seed=seed))[0].token_ids != generate([1], params_of(seed=8))[0].token_ids


@pytest.mark.parametrize("top_k", [0, -1, 260, 9999999])
def test_a_greedy_neighbour_of_one_whose_top_k_is_off_is_untouched(top_k):
    running = engine()
    running.add_request([1, 2], params_of(temperature=0))
    running.add_request([1, 2], params_of(top_k=top_k, seed=1))
    outputs, _ = finish(running)
    assert outputs[0, 0].token_ids == generate([1, 2], params_of(temperature=0))[0].token_ids
    assert outputs[1, 0].token_ids == generate([1, 2], params_of(seed=1))[0].token_ids


def test_a_request_that_names_no_processor_there_is_is_refused():
    with pytest.raises(RequestError, match=r"extra names 'loud'.*there are: none"):
        engine().add_request([1], params_of(extra={"loud": 1}))


def test_bad_words_need_a_tokenizer_that_writes_them():
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        engine(tokenizer=object()).add_request([1], params_of(bad_words=["a"]))


def test_what_parameters_amount_to_is_said_in_words():
    assert effective(SamplingParams(temperature=0, top_k=5, top_p=0.5)) == "greedy"
    said = effective(SamplingParams(temperature=0.7, top_k=-1, top_p=0.9, repetition_penalty=1.1))
    assert said == "temperature 0.7, top-p 0.9, repetition penalty 1.1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_num_seqs", value) for value in (0, -1)),
        ("max_num_batched_tokens", 0),
        ("max_logits_rows", 0),
        ("max_logits_rows", 31),
        ("max_queue", 0),
        ("kv_memory", 0),
        ("max_model_len", -5),
        ("policy", "lifo"),
        ("determinism", "maybe"),
    ],
)
def test_limits_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"engine\.{name}={value!r}"):
        Limits(**{name: value})
