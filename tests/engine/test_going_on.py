"""A text goes on from any of its tokens as it did where it was first generated, whatever its parameters remember."""

import pytest
from engines import VOCAB, engine

from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import RequestError

PROMPT = [7, 8, 9]
REMEMBERING = SamplingParams(
    max_tokens=24,
    top_k=3,
    frequency_penalty=1.5,
    repetition_penalty=1.2,
    min_tokens=6,
    bad_words=("ab",),
    logprobs=2,
    stop=("\x00",),
)


def outputs(running):
    return {output.sample: output for step in running.run() for output in step.finished}


def gone_on(whole, done, limits, params, sample=0, **options):
    running = engine(limits, seed=5, **options)
    running.add_request(PROMPT, params, index=3, output_token_ids=whole.token_ids[:done], sample=sample)
    return outputs(running)[sample]


@pytest.mark.parametrize("limits", [Limits(), Limits(max_num_batched_tokens=4, max_num_seqs=2)])
def test_a_text_goes_on_from_every_token(limits: Limits):
    running = engine(limits, seed=5)
    running.add_request(PROMPT, REMEMBERING, index=3)
    whole = outputs(running)[0]
    for done in range(len(whole.token_ids)):
        rest = gone_on(whole, done, limits, REMEMBERING)
        assert (rest.token_ids, rest.text, rest.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
        assert rest.logprobs == whole.logprobs[done:]
        assert rest.stats.generated_tokens == len(whole.token_ids) - done


def test_each_of_several_samples_goes_on_by_its_number():
    running = engine(seed=5)
    running.add_request(PROMPT, SamplingParams(n=3, max_tokens=12), index=3)
    for sample, whole in outputs(running).items():
        rest = gone_on(whole, 5, Limits(), SamplingParams(max_tokens=12), sample)
        assert rest.token_ids == whole.token_ids


def test_one_that_is_put_aside_again_goes_on_all_the_same():
    params = SamplingParams(max_tokens=40)
    running = engine(seed=5)
    running.add_request(PROMPT, params, index=3)
    whole = outputs(running)[0]
    tight = engine(seed=5, block_size=4, num_blocks=16)
    for index in (3, 4, 5):
        tight.add_request(PROMPT, params, index=index, output_token_ids=whole.token_ids[:20])
    steps = list(tight.run())
    assert sum(step.stats.preemptions for step in steps)
    (found,) = [o for step in steps for o in step.finished if o.index == 3]
    assert found.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([VOCAB], {}, "output token 260 is not an id of the vocabulary"),
        ([1, 2], {"max_tokens": 2}, "of 2 tokens that may be generated 2 are given"),
        ([1], {"n": 2}, "n=2: one sample at a time"),
    ],
)
def test_what_can_not_go_on_is_refused(tokens, params, message):
    with pytest.raises(RequestError, match=message):
        engine().add_request(PROMPT, SamplingParams(**params), output_token_ids=tokens)
