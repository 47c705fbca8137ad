"""A request's tokens, text and end are its own, however the engine packs, cuts, puts aside and resumes the work."""

from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.engine.engine import Engine, Observers
from xinfer.engine.outputs import RequestOutput, StepOutput, TokenOutput
from xinfer.engine.random import derive, uniform
from xinfer.engine.types import FinishReason, Limits, Request, SamplingParams, State
from xinfer.errors import RequestError
from xinfer.testing.fake import EOS, FakeRunner, FakeTokenizer, context_logits

VOCAB = 260
ROOMY = {"block_size": 16, "num_blocks": 256}
DEFAULT, SILENT, BYTES = Limits(), Observers(), FakeTokenizer()


def engine(limits=DEFAULT, *, seed=0, eos=(), observers=SILENT, tokenizer=BYTES, **runner):
    options = ROOMY | runner
    fake = FakeRunner(vocab_size=VOCAB, max_logits_rows=limits.logits_rows, **options)
    return Engine(fake, tokenizer, limits, seed=seed, eos_token_ids=eos, observers=observers)


def finish(running):
    """Step until all is done; return the results by request and the steps."""
    steps = list(running.run())
    assert running.scheduler.pool.num_used == 0
    assert running.scheduler.pool.num_free == running.runner.info.num_blocks
    return {output.request_id: output for step in steps for output in step.finished}, steps


def generate(prompt, params, **options):
    """The result of one request that has an engine to itself."""
    alone = engine(**options)
    alone.add_request(prompt, params)
    return finish(alone)[0]["0"]


def saying(text, start=0, **params):
    """A request after whose prompt of `start` tokens the model says this text, and the runner's script for it."""
    data = text if isinstance(text, bytes) else text.encode()
    return {start + n: token for n, token in enumerate(data)}, SamplingParams(
        temperature=0, max_tokens=len(data), **params
    )


def hear(text, **params):
    """The result of a request whose output is this text, followed by whatever the hash brings."""
    script, sampling = saying(text, 1, **params)
    return generate([65], sampling, script=script)


def what(output):
    """What must not depend on how the work was packed."""
    return output.token_ids, output.text, output.finish_reason, output.error


def by_hand(prompt, params, seed):
    """Generate with the plainest loop there is: whole context in, one token out."""
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        logits = context_logits(tokens, VOCAB).astype(np.float64)
        if params.temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        weights = np.exp((logits - logits.max()) / params.temperature)
        if params.top_k > 0:
            weights[np.argsort(-logits, kind="stable")[params.top_k :]] = 0
        cdf = weights.cumsum()
        tokens.append(int((cdf > uniform([seed], [len(tokens)])[0] * cdf[-1]).argmax()))
    return tuple(tokens[len(prompt) :])


# One request


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"temperature": 0.7}, {"top_k": 5}, {"seed": 0}, {"seed": 9}]
)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_a_request_equals_the_plainest_loop(params, length):
    params = SamplingParams(max_tokens=40, **params)
    prompt = list(range(length))
    output = generate(prompt, params, seed=5)
    assert output.token_ids == by_hand(prompt, params, 5 if params.seed is None else params.seed)
    assert output.finish_reason is FinishReason.LENGTH
    text = bytes(token for token in output.token_ids if token < 256).decode(errors="replace")
    assert output.text.rstrip("\ufffd") == text.rstrip("\ufffd")


def test_each_request_of_a_run_has_its_own_seed():
    running = engine(seed=5)
    params = SamplingParams(max_tokens=20)
    for _ in range(4):
        running.add_request([1, 2, 3], params)
    outputs, _ = finish(running)
    assert [outputs[str(i)].seed for i in range(4)] == [derive(5, i) for i in range(4)]
    assert [outputs[str(i)].token_ids for i in range(4)] == [by_hand([1, 2, 3], params, derive(5, i)) for i in range(4)]
    assert len({output.token_ids for output in outputs.values()}) == 4


def test_a_request_can_be_given_the_index_it_had_in_another_run():
    running = engine(seed=5)
    assert running.add_request([1], SamplingParams(), index=7).seed == derive(5, 7)
    assert running.add_request([1], SamplingParams()).index == 8
    with pytest.raises(RequestError, match="index=7"):
        running.add_request([1], SamplingParams(), index=7)


def test_an_earlier_index_given_again_does_not_count_among_the_next_ones():
    running = engine(seed=5)
    assert [running.add_request([1], SamplingParams(), index=index).index for index in (7, 2, None)] == [7, 2, 8]
    assert [sequence.request.index for sequence in running.scheduler.waiting] == [7, 2, 8]  # in the order of arrival


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    output = generate([1], SamplingParams(max_tokens=5, stop=("a",)), tokenizer=None)
    assert (len(output.token_ids), output.text, output.tail) == (5, "", "")


# Batches


@dataclass(frozen=True)
class Work:
    prompt: tuple[int, ...]
    params: SamplingParams


works = st.builds(
    Work,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(tuple),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        top_k=st.sampled_from([0, 3, 50]),
        top_p=st.sampled_from([1.0, 0.9, 0.5]),
        min_p=st.sampled_from([0.0, 0.1]),
        seed=st.none() | st.integers(0, 2**64 - 1),
        max_tokens=st.integers(1, 24),
        stop=st.sampled_from([(), ("a", "bc"), ("\ufffd\ufffd",)]),
        stop_token_ids=st.sampled_from([(), tuple(range(0, 250, 25))]),
        ignore_eos=st.booleans(),
        include_stop_str_in_output=st.booleans(),
        skip_special_tokens=st.booleans(),
    ),
)


@st.composite
def engines(draw):
    """Limits and cache sizes, most of them too tight for all requests at once."""
    limits = Limits(
        max_num_seqs=draw(st.integers(1, 8)), max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 33, 2048]))
    )
    block_size = draw(st.sampled_from([1, 2, 3, 8, 16, 64]))
    needed = -(-64 // block_size)  # the longest sequence of `works`
    return limits, {"block_size": block_size, "num_blocks": draw(st.integers(needed, 3 * needed)), "max_model_len": 64}


def alone(index, work):
    params = work.params
    if params.seed is None:
        params = replace(params, seed=derive(3, index))
    return generate(work.prompt, params, eos=[EOS, 257])


@settings(max_examples=120)
@given(st.lists(works, min_size=1, max_size=8), engines(), st.data())
def test_requests_together_equal_each_alone_whatever_the_limits(requests, shape, data):
    limits, cache = shape
    running = engine(limits, seed=3, eos=[EOS, 257], **cache)
    late = data.draw(st.integers(0, len(requests)))  # these come while others already run
    steps = []
    for i, work in enumerate(requests):
        running.add_request(work.prompt, work.params)
        if i >= late:
            steps.append(running.step())
    outputs, more = finish(running)
    steps += more
    outputs |= {output.request_id: output for step in steps for output in step.finished}
    for i, work in enumerate(requests):
        assert what(outputs[str(i)]) == what(alone(i, work))
    for step in steps:
        assert step.stats.batch_size <= limits.max_num_seqs
        assert step.stats.prefill_tokens + step.stats.decode_tokens <= limits.max_num_batched_tokens
        assert step.stats.kv_blocks_used + step.stats.kv_blocks_free == cache["num_blocks"]
    assert_deltas_make_texts(outputs, steps)


def assert_deltas_make_texts(outputs, steps):
    for name, output in outputs.items():
        tokens = [token for step in steps for token in step.tokens if token.request.request_id == name]
        assert tuple(token.token_id for token in tokens) == output.token_ids
        assert "".join(token.text for token in tokens) + output.tail == output.text


@pytest.mark.parametrize("params", [{"temperature": 0}, {}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [5, 2048])
def test_a_request_that_was_put_aside_continues_as_if_nothing_had_happened(params, budget):
    params = SamplingParams(max_tokens=40, **params)
    tight = engine(Limits(max_num_batched_tokens=budget), block_size=4, num_blocks=16, max_model_len=64)
    prompts = [[n] * (5 + n) for n in range(4)]
    for prompt in prompts:
        tight.add_request(prompt, params)
    outputs, steps = finish(tight)
    assert sum(step.stats.preemptions for step in steps) >= 2
    put_aside = [o for o in outputs.values() if State.PREEMPTED in [state for state, _ in o.history]]
    assert sum(step.stats.preemptions for step in steps) == sum(
        [state for state, _ in o.history].count(State.PREEMPTED) for o in put_aside
    )
    assert len(put_aside) >= 2
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].token_ids == by_hand(prompt, params, derive(0, i))
        assert outputs[str(i)].stats.generated_tokens == 40
    assert_deltas_make_texts(outputs, steps)


def test_the_first_to_come_is_the_last_to_be_put_aside():
    tight = engine(block_size=4, num_blocks=16, max_model_len=64)
    for n in range(4):
        tight.add_request([n] * 5, SamplingParams(max_tokens=40, temperature=0))
    outputs, steps = finish(tight)
    assert [output.request_id for step in steps for output in step.finished] == ["0", "1", "2", "3"]
    assert State.PREEMPTED not in [state for state, _ in outputs["0"].history]


def test_many_requests_share_a_step():
    running = engine(Limits(max_num_seqs=256, max_num_batched_tokens=4096), num_blocks=256 * 4)
    for n in range(256):
        running.add_request([n], SamplingParams(max_tokens=30))
    outputs, steps = finish(running)
    assert [step.stats.batch_size for step in steps] == [256] * 30
    assert all(outputs[str(n)].token_ids == by_hand([n], SamplingParams(max_tokens=30), derive(0, n)) for n in (0, 255))


def test_blocks_are_told_to_the_runner_when_nobody_holds_them_any_more():
    running = engine(Limits(prefix_cache=False), block_size=4, num_blocks=16, max_model_len=64)
    for n in range(4):
        running.add_request([n] * 5, SamplingParams(max_tokens=40))
    before = set()
    for _ in running.run():
        held = [block for sequence in running.scheduler.running for block in sequence.blocks]
        assert len(set(held)) == len(held)
        assert set(running.runner.freed) == before - set(held)
        running.runner.freed.clear()
        before = set(held)
    assert before == set()


def test_what_was_put_aside_waits_for_another_step_even_if_a_part_of_it_would_fit():
    tight = engine(Limits(max_num_batched_tokens=6), block_size=4, num_blocks=16, max_model_len=64)
    for n in range(4):
        tight.add_request([n] * 5, SamplingParams(max_tokens=40))
    preemptions = 0
    for step in tight.run():
        aside = [sequence for sequence in tight.scheduler.waiting if sequence.state is State.PREEMPTED]
        assert len(aside) >= step.stats.preemptions
        preemptions += step.stats.preemptions
    assert preemptions >= 2


# A text resumed


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 0}, {"seed": 2**64 - 1, "top_p": 0.9, "top_k": 30}])
def test_a_text_can_be_resumed_at_every_token(params):
    prompt = [7, 8, 9]
    whole = generate(prompt, SamplingParams(max_tokens=20, **params)).token_ids
    for done in range(20):
        rest = generate([*prompt, *whole[:done]], SamplingParams(max_tokens=20 - done, **params))
        assert rest.token_ids == whole[done:]


# Aborts (V04, V05)


def test_waiting_requests_can_be_aborted_at_once():
    running = engine()
    for _ in range(20):
        running.add_request([1], SamplingParams())
    for n in range(20):
        running.abort(str(n))
        running.abort(str(n))
    running.abort("unknown")
    assert not running.scheduler.has_work
    assert running.has_work  # their results are still to be told
    step = running.step()
    assert [output.request_id for output in step.finished] == [str(n) for n in range(20)]
    assert {(o.finish_reason, o.token_ids, o.text, o.stats.queue_ms) for o in step.finished} == {
        ("abort", (), "", None)
    }
    assert step.stats.stage == "idle"
    assert not running.has_work
    running.abort("3")
    assert not running.has_work


@settings(max_examples=60)
@given(st.lists(works, min_size=1, max_size=6), engines(), st.data())
def test_an_abort_at_any_time_frees_its_blocks_and_harms_no_other(requests, shape, data):
    limits, cache = shape
    running = engine(limits, seed=3, eos=[EOS, 257], **cache)
    for work in requests:
        running.add_request(work.prompt, work.params)
    plan = data.draw(st.dictionaries(st.integers(0, 30), st.integers(0, len(requests) - 1), max_size=4))
    outputs, steps, count = {}, [], 0
    while running.has_work:
        if count in plan:
            name = str(plan[count])
            samples = list(running._sequences.get(name, ()))
            running.abort(name)
            assert all(sequence.blocks == [] for sequence in samples)
        steps.append(running.step())
        outputs |= {output.request_id: output for output in steps[-1].finished}
        count += 1
    assert running.scheduler.pool.num_used == 0
    for i, work in enumerate(requests):
        output, full = outputs[str(i)], alone(i, work)
        if output.finish_reason is FinishReason.ABORT:
            assert i in plan.values()
            assert output.token_ids == full.token_ids[: len(output.token_ids)]
            assert len(output.token_ids) < len(full.token_ids)
            assert output.text.removesuffix(output.tail) == full.text[: len(output.text) - len(output.tail)]
        else:
            assert what(output) == what(full)
    assert_deltas_make_texts(outputs, steps)


@pytest.mark.parametrize("script", ["hello world, and more of it"])
def test_an_aborted_request_has_its_text_so_far(script):
    words, params = saying(script, 1, stop=("wonder",))
    running = engine(script=words)
    running.add_request([65], params)
    shown = "".join(token.text for _ in range(8) for token in running.step().tokens)
    running.abort("0")
    (output,) = running.step().finished
    assert shown == "hello "  # "wo" may become "wonder"
    assert (output.text, output.tail, output.finish_reason) == ("hello wo", "wo", FinishReason.ABORT)


@pytest.mark.parametrize("victim", ["0", "1", "2"])
@pytest.mark.parametrize("event", ["on_token", "on_step", "on_request_finished"])
def test_an_observer_may_abort_any_request(event, victim):
    def abort(*_):
        running.abort(victim)

    running = engine(observers=Observers(**{event: (abort,)}))
    lengths = [10, 1, 10]
    for length in lengths:
        running.add_request([1], SamplingParams(max_tokens=length))
    outputs, _ = finish(running)
    for i, length in enumerate(lengths):
        aborted = str(i) == victim and length > 1
        assert outputs[str(i)].finish_reason == ("abort" if aborted else "length")
        assert len(outputs[str(i)].token_ids) == (1 if aborted else length)


# What can't run is refused (V01, V02, K08)


@pytest.mark.parametrize(
    ("runner", "limit", "longest"),
    [
        ({"max_model_len": 32}, None, 32),
        ({"max_model_len": 64}, 32, 32),
        ({"max_model_len": 64, "block_size": 8, "num_blocks": 4}, None, 32),
        ({"max_model_len": 32}, 64, 32),
    ],
)
def test_the_context_is_what_model_limits_and_cache_allow(runner, limit, longest):
    running = engine(Limits(max_model_len=limit), **runner)
    assert running.max_model_len == longest
    for length in (longest, longest + 1):
        with pytest.raises(RequestError, match=rf"{length} tokens.* {longest} "):
            running.add_request([1] * length, SamplingParams(max_tokens=None))
    with pytest.raises(RequestError, match=rf"22 tokens and max_tokens=11 make 33.*{longest}"):
        running.add_request([1] * 22, SamplingParams(max_tokens=11))
    assert not running.has_work
    for length, max_tokens in ((longest - 1, None), (longest - 1, 1), (22, 10), (22, None)):
        output = running.add_request([1] * length, SamplingParams(max_tokens=max_tokens, temperature=0))
        outputs, _ = finish(running)
        assert outputs[output.request_id].finish_reason is FinishReason.LENGTH
        assert len(outputs[output.request_id].token_ids) == longest - length


@pytest.mark.parametrize("bad", [-1, VOCAB, 5279552648203111001, True, 1.5, "1", None, [1, 2]])
def test_an_id_outside_the_vocabulary_is_refused_by_name(bad):
    running = engine()
    with pytest.raises(RequestError, match="vocabulary") as caught:
        running.add_request([1, bad], SamplingParams())
    assert repr(bad) in str(caught.value)
    assert not running.has_work


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(RequestError, match="no tokens"):
        engine().add_request([], SamplingParams())


def test_a_prompt_may_be_a_numpy_array():
    params = SamplingParams(max_tokens=5)
    assert generate(np.array([1, 2, 3]), params).token_ids == generate([1, 2, 3], params).token_ids


def test_a_refused_request_takes_no_index():
    running = engine()
    with pytest.raises(RequestError):
        running.add_request([-1], SamplingParams())
    assert running.add_request([1], SamplingParams()).index == 0


# Ends: end-of-sequence and stop tokens, stop strings (T01, T02, T05, T07, T13)


def test_a_text_ends_at_either_end_of_sequence_token():
    for end in (EOS, 257):
        output = generate([65], SamplingParams(stop=("\nObservation",)), eos=[EOS, 257], script={1: 66, 2: 67, 3: end})
        assert (output.text, output.finish_reason) == ("BC", FinishReason.STOP)
        assert output.token_ids == (66, 67, end)


def test_ignore_eos_goes_on_after_all_of_them():
    script = dict(enumerate([EOS, 66, 257, 67] * 10, start=1))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    output = generate([65], params, eos=[EOS, 257], script=script)
    assert (output.text, len(output.token_ids), output.finish_reason) == ("BC" * 10, 40, FinishReason.LENGTH)


def test_ignore_eos_leaves_the_requests_own_stop_tokens():
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(67,))
    output = generate([65], params, eos=[EOS], script={1: EOS, 2: 66, 3: 67})
    assert (output.text, output.token_ids, output.finish_reason) == ("B", (EOS, 66, 67), FinishReason.STOP)


@pytest.mark.parametrize(("include", "text"), [(False, "B"), (True, "BC")])
def test_the_stop_token_is_in_the_text_only_where_that_was_asked_for(include, text):
    params = SamplingParams(stop_token_ids=(67,), include_stop_str_in_output=include)
    output = generate([65], params, script={1: 66, 2: 67})
    assert (output.text, output.token_ids) == (text, (66, 67))


@pytest.mark.parametrize(("skip", "text"), [(True, "BC"), (False, "B<|258|>C")])
def test_special_tokens_are_in_the_text_only_where_that_was_asked_for(skip, text):
    params = SamplingParams(max_tokens=3, skip_special_tokens=skip)
    assert generate([65], params, script={1: 66, 2: 258, 3: 67}).text == text


def test_an_end_at_the_last_token_allowed_is_a_stop():
    assert generate([65], SamplingParams(max_tokens=1), eos=[EOS], script={1: EOS}).finish_reason is FinishReason.STOP
    assert hear("ab", stop=("b",)).finish_reason is FinishReason.STOP


def test_nothing_is_shown_of_a_text_that_is_the_stop_string():
    output = hear("DEFGHIJKLM", stop=("DEFGHIJ",))
    assert (output.text, output.finish_reason) == ("", FinishReason.STOP)
    assert output.stats.generated_tokens == 7


@pytest.mark.parametrize(("include", "text"), [(False, " L M N "), (True, " L M N O P Q")])
def test_the_text_is_cut_at_the_stop_string_and_all_tokens_count(include, text):
    output = hear(" L M N O P Q R S", stop=("O P Q",), include_stop_str_in_output=include)
    assert (output.text, output.finish_reason, output.stats.generated_tokens) == (text, FinishReason.STOP, 12)


def test_a_stop_string_that_never_comes_whole_is_text():
    output = hear("the EN", stop=("END",))
    assert (output.text, output.tail, output.finish_reason) == ("the EN", "EN", FinishReason.LENGTH)


def test_characters_come_whole():
    script, params = saying("ď😀😃 x", 1)
    running = engine(script=script)
    running.add_request([65], params)
    deltas = [token.text for step in running.run() for token in step.tokens]
    assert deltas == ["", "ď", "", "", "", "😀", "", "", "", "😃", " ", "x"]


def test_a_text_that_ends_inside_a_character_ends_in_one_replacement_character():
    output = hear("Hello😀".encode()[:-2])
    assert (output.text, output.tail) == ("Hello\ufffd", "\ufffd")
    ended = generate([65], SamplingParams(), eos=[EOS], script={1: 66, 2: 0xF0, 3: 0x9F, 4: EOS})
    assert (ended.text, ended.finish_reason) == ("B\ufffd", FinishReason.STOP)


# Rows that are not finite (S13)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("when", [3, 7])
def test_a_row_of_nan_ends_its_request_and_no_other(params, when):
    params = SamplingParams(max_tokens=10, **params)
    running = engine(nan_rows=lambda context: context[0] == 1 and len(context) == when)
    prompts = [[0, 5], [1, 5, 5], [2, 5]]
    for prompt in prompts:
        running.add_request(prompt, params)
    outputs, _ = finish(running)
    assert outputs["1"].finish_reason is FinishReason.ERROR
    assert "not finite" in outputs["1"].error
    assert outputs["1"].token_ids == generate(prompts[1], replace(params, seed=derive(0, 1))).token_ids[: when - 3]
    for i in (0, 2):
        assert what(outputs[str(i)]) == what(generate(prompts[i], replace(params, seed=derive(0, i))))


# Observers


def test_observers_hear_tokens_then_results_then_the_step_in_order():
    heard = []
    observers = Observers(
        on_step=(heard.append, lambda step: heard.append("again")),
        on_token=(lambda request, token: heard.append((request, token)),),
        on_request_finished=(heard.append,),
    )
    running = engine(observers=observers)
    requests = [running.add_request([n], SamplingParams(max_tokens=1 + n)) for n in range(3)]
    by_id = {request.request_id: request for request in requests}
    expected = []
    for step in running.run():
        expected += [(by_id[token.request.request_id], token) for token in step.tokens]
        expected += [*step.finished, step, "again"]
    assert heard == expected
    assert sum(isinstance(event, RequestOutput) for event in heard) == 3


def test_what_observers_get_can_not_be_changed():
    heard = []
    observers = Observers((heard.append,), (lambda *event: heard.extend(event),), (heard.append,))
    running = engine(observers=observers)
    running.add_request([1], SamplingParams(max_tokens=2))
    finish(running)
    assert {type(event) for event in heard} == {StepOutput, Request, TokenOutput, RequestOutput}
    for event in heard:
        for name in event.__dataclass_fields__:
            with pytest.raises(FrozenInstanceError):
                setattr(event, name, None)
            assert not isinstance(getattr(event, name), list | dict | set)


# Figures


def run_some():
    running = engine(Limits(max_num_batched_tokens=16), seed=3)
    prompts = [[1] * 20, [2] * 3, [3]]
    for prompt, count in zip(prompts, (5, 1, 8), strict=True):
        running.add_request(prompt, SamplingParams(max_tokens=count))
    outputs, steps = finish(running)
    return prompts, outputs, steps


def test_the_parts_of_a_step_add_up():
    for step in run_some()[2]:
        stats = step.stats
        parts = [stats.schedule_ms, stats.forward_ms, stats.sample_ms, stats.output_ms]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(stats.step_ms)


def test_every_token_is_counted_once_as_prefill_or_decode():
    prompts, outputs, steps = run_some()
    assert sum(step.stats.prefill_tokens for step in steps) == sum(map(len, prompts))
    assert sum(step.stats.decode_tokens for step in steps) == sum(len(o.token_ids) - 1 for o in outputs.values())
    assert [step.stats.step for step in steps] == list(range(len(steps)))
    assert steps[0].stats.stage == "prefill"
    assert steps[0].stats.scheduler_queue_length == 2
    assert steps[-1].stats.stage == "decode"
    assert all(earlier.stats.time < later.stats.time for earlier, later in pairwise(steps))


def test_a_results_figures_follow_from_its_times():
    prompts, outputs, _ = run_some()
    for i, prompt in enumerate(prompts):
        output, stats = outputs[str(i)], outputs[str(i)].stats
        states, moments = zip(*output.history, strict=True)
        assert states == ("waiting", "prefill", "decode", "finished")
        arrived, started, first, ended = moments
        times = output.token_times
        assert first == times[0]
        assert [arrived, started, *times, ended] == sorted([arrived, started, *times, ended])
        assert (stats.prompt_tokens, stats.generated_tokens) == (len(prompt), len(times))
        assert len(times) == len(output.token_ids)
        assert stats.queue_ms == pytest.approx((started - arrived) * 1e3)
        assert stats.ttft_ms == pytest.approx((times[0] - arrived) * 1e3)
        assert stats.prefill_ms == pytest.approx((times[0] - started) * 1e3)
        assert stats.e2e_ms == pytest.approx((ended - arrived) * 1e3)
        assert stats.itl_ms == pytest.approx([(b - a) * 1e3 for a, b in pairwise(times)])
        if len(times) > 1:
            assert stats.tpot_ms == pytest.approx((times[-1] - times[0]) * 1e3 / (len(times) - 1))
            assert stats.decode_tok_s == pytest.approx(len(times) / (times[-1] - times[0]))
        assert stats.prefill_tok_s == pytest.approx(len(prompt) / (times[0] - started))
        assert stats.seed == output.seed == derive(3, i)


def test_what_is_computed_again_after_a_preemption_counts_as_prefill():
    running = engine(block_size=4, num_blocks=8, max_model_len=32)
    prompts = [[n] * 6 for n in range(1, 4)]
    for prompt in prompts:
        running.add_request(prompt, SamplingParams(max_tokens=18, ignore_eos=True))
    steps = list(running.run())
    assert sum(step.stats.preemptions for step in steps) > 0
    generated = sum(len(step.tokens) for step in steps)
    assert sum(step.stats.decode_tokens for step in steps) < generated
    computed = sum(step.stats.decode_tokens + step.stats.prefill_tokens for step in steps)
    assert computed > sum(len(prompt) for prompt in prompts) + generated - len(prompts)


@pytest.mark.parametrize("index", [-1, 2**32])
def test_an_index_out_of_range_is_named(index: int):
    with pytest.raises(RequestError, match=f"index={index} is out of range"):
        engine().add_request([1], SamplingParams(), index=index)
