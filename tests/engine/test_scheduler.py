"""Who goes first, who waits, who is refused, and what it costs."""

from math import log2

import pytest
from engines import VOCAB, engine, fake, finish, generate, params_of, what

from xinfer.engine.scheduler import Scheduler
from xinfer.engine.types import FinishReason, Limits, Request, SamplingParams, Sequence, State
from xinfer.errors import OverloadedError, RequestError

ONE = {"max_num_seqs": 1}


class Clock:
    """A time that passes only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def started(steps):
    """The requests' indices in the order of their first tokens."""
    return list(dict.fromkeys(token.request.index for step in steps for token in step.tokens))


def run(limits, *requests, **options):
    """The order in which requests of these priorities and lengths get their first tokens."""
    running = engine(Limits(**ONE, **limits), **options)
    for priority, length in requests:
        running.add_request([1] * length, params_of(max_tokens=2), priority=priority)
    return started(finish(running)[1])


# Policies


@pytest.mark.parametrize("seqs", [1, 2, 3])
def test_first_come_is_first_served_whatever_the_priorities_and_lengths(seqs):
    running = engine(Limits(max_num_seqs=seqs))
    for n, priority in enumerate([3, -1, 2, 0, 5, -7]):
        running.add_request([n] * (40 - 7 * n), params_of(max_tokens=1 + n), priority=priority)
    assert started(finish(running)[1]) == list(range(6))


def test_lower_priorities_go_first_and_equal_ones_as_they_came():
    requests = [(3, 5), (1, 5), (2, 5), (1, 5), (-2, 5), (0, 5), (3, 5)]
    in_order = sorted(range(7), key=lambda n: (requests[n][0], n))
    assert run({"policy": "priority"}, *requests) == in_order
    assert run({"policy": "fcfs"}, *requests) == list(range(7))


def test_of_equal_priority_the_short_overtake_the_long():
    lengths = [400, 3, 200, 60, 3]
    in_order = sorted(range(5), key=lambda n: (lengths[n], n))
    assert run({"policy": "priority"}, *((0, length) for length in lengths)) == in_order


def test_a_long_request_is_overtaken_only_by_those_that_come_soon():
    running = engine(Limits(**ONE, policy="priority"))
    running.add_request([1], params_of(max_tokens=100))  # has the only place
    steps = [running.step()]
    running.add_request([2] * 400, params_of(max_tokens=1))
    for _ in range(50):
        steps.append(running.step())
        running.add_request([3], params_of(max_tokens=1))
    order = started([*steps, *finish(running)[1]])
    assert 1 < order.index(1) < 12


@pytest.mark.parametrize("priority", [1, 2])
def test_an_endless_stream_of_urgent_requests_starves_nobody(priority):
    running = engine(Limits(**ONE, policy="priority"))
    running.add_request([1], params_of(max_tokens=1), priority=0)
    patient = running.add_request([9], params_of(max_tokens=1), priority=priority)
    steps = 0
    while not any(token.request is patient for token in running.step().tokens):
        running.add_request([1], params_of(max_tokens=1), priority=0)
        steps += 1
    assert 200 * priority < steps < 300 * priority


def test_a_running_request_yields_to_a_much_more_urgent_one_and_goes_on_after_it():
    params = params_of(max_tokens=30, temperature=0, logprobs=1)
    running = engine(Limits(**ONE, policy="priority"))
    running.add_request([1, 2, 3], params, priority=2)
    steps = [running.step() for _ in range(10)]
    running.add_request([4, 5], params, priority=0)
    urgent = running.step()
    assert [(token.request.index, step.stats.preemptions) for step in [urgent] for token in step.tokens] == [(1, 1)]
    outputs, more = finish(running)
    assert sum(step.stats.preemptions for step in more) == 0
    assert [o.index for step in [*steps, *more] for o in step.finished] == [1, 0]
    for index, prompt in enumerate(([1, 2, 3], [4, 5])):
        assert what(outputs[index, 0])[:5] == what(generate(prompt, params)[0])[:5]
    assert State.PREEMPTED in [state for state, _ in outputs[0, 0].history]


@pytest.mark.parametrize(("policy", "priority"), [("priority", 1), ("fcfs", -5), ("priority", 2)])
def test_a_running_request_does_not_yield_to_its_equals(policy, priority):
    running = engine(Limits(**ONE, policy=policy))
    running.add_request([1] * 100, params_of(max_tokens=30), priority=1)
    running.step()
    running.add_request([2], params_of(max_tokens=1), priority=priority)
    _, steps = finish(running)
    assert sum(step.stats.preemptions for step in steps) == 0
    assert [o.index for step in steps for o in step.finished] == [0, 1]


def test_of_those_that_run_the_least_urgent_one_yields():
    running = engine(Limits(max_num_seqs=3, policy="priority"))
    for priority in (1, 3, 2):
        running.add_request([priority], params_of(max_tokens=20), priority=priority)
    running.step()
    running.add_request([9], params_of(max_tokens=20), priority=0)
    running.step()
    assert [s.request.index for s in running.scheduler.waiting] == [1]
    finish(running)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_short_of_blocks_the_least_urgent_and_then_the_youngest_gives_them(policy):
    running = engine(Limits(policy=policy), block_size=4, num_blocks=12, max_model_len=48)
    for priority in (1, 0, 1, 0):
        running.add_request([1] * 6, params_of(max_tokens=40, temperature=0), priority=priority)
    outputs, steps = finish(running)
    assert sum(step.stats.preemptions for step in steps) >= 3
    order = [o.index for step in steps for o in step.finished]
    assert order.index(1) < order.index(3)
    assert order.index(0) < order.index(2)
    assert State.PREEMPTED not in [state for state, _ in outputs[1, 0].history]


# A long prompt beside those that decode


@pytest.mark.parametrize("budget", [4, 8, 64])
def test_who_decodes_gets_a_token_in_every_step_while_a_long_prompt_is_computed(budget):
    running = engine(Limits(max_num_batched_tokens=budget))
    for n in range(3):
        running.add_request([n], params_of(max_tokens=400))
    running.step()
    running.add_request([9] * 300, params_of(max_tokens=1))
    computed = 0
    while computed < 300:
        step = running.step()
        assert {token.request.index for token in step.tokens} >= {0, 1, 2}
        assert step.stats.prefill_tokens == min(budget - 3, 300 - computed)
        computed += step.stats.prefill_tokens
    finish(running)


# The queue's bound


def test_a_full_queue_refuses_and_takes_again_once_there_is_room():
    running = engine(Limits(**ONE, max_queue=3))
    running.add_request([1], params_of())
    running.step()
    for _ in range(3):
        running.add_request([1], params_of())
    with pytest.raises(OverloadedError, match=r"^3 requests wait already, and engine\.max_queue=3: try again later"):
        running.add_request([1], params_of())
    running.abort("2")
    assert running.add_request([1], params_of()).index == 4
    with pytest.raises(OverloadedError):
        running.add_request([1], params_of())
    outputs, _ = finish(running)
    assert sorted(outputs) == [(n, 0) for n in range(5)]


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def test_a_hundred_thousand_waiting_requests_cost_each_what_a_few_do():
    count, params = 100_000, SamplingParams(max_tokens=1)
    scheduler = Scheduler(Limits(max_num_seqs=64, policy="priority"), fake().info)
    waiting = [Sequence(Request(str(n), n, (1,), params, 0, arrival=Counted(n)), [1], 2) for n in range(count)]
    Counted.compared = 0
    for sequence in waiting:
        scheduler.add(sequence)
    assert Counted.compared < 4 * count
    Counted.compared = 0
    for sequence in waiting[::2]:
        scheduler.remove(sequence)
    assert Counted.compared == 0
    served = []
    for _ in range(50):
        plan = scheduler.schedule()
        served += plan.sequences
        for sequence in plan.sequences:
            scheduler.remove(sequence)
    assert served == waiting[1 : 2 * 64 * 50 : 2]
    assert Counted.compared < 2 * 64 * 50 * 4 * log2(count)
    assert scheduler.num_waiting == count // 2 - 64 * 50


# Deadlines


def overdue(running, clock, index, at=5.0):
    """Let the time come; return the samples that ended with it."""
    clock.now = 100 + at - 0.001
    assert not [o for o in running.step().finished if o.index == index], "it ended too early"
    clock.now = 100 + at
    return [o for o in running.step().finished if o.index == index]


def test_a_request_that_waits_ends_when_its_time_is_over():
    clock = Clock()
    running = engine(Limits(**ONE), clock=clock)
    running.add_request([1], params_of(max_tokens=50))
    running.add_request([2], params_of(n=2), timeout_s=5)
    ended = overdue(running, clock, 1)
    assert [(o.finish_reason, o.token_ids, o.stats.queue_ms, o.sample) for o in ended] == [
        (FinishReason.TIMEOUT, (), None, 0),
        (FinishReason.TIMEOUT, (), None, 1),
    ]
    outputs, _ = finish(running)
    assert outputs[0, 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", [3, 40], ids=["prefill", "decode"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_runs_ends_with_what_it_has_when_its_time_is_over(steps, n):
    clock, params = Clock(), params_of(max_tokens=200, n=n)
    running = engine(Limits(max_num_batched_tokens=4), clock=clock)
    running.add_request([1] * 40, params, timeout_s=5)
    for _ in range(steps):
        running.step()
    ended = overdue(running, clock, 0)
    assert [o.finish_reason for o in ended] == [FinishReason.TIMEOUT] * n
    assert running.scheduler.pool.num_used == 0
    assert not running.has_work
    for o, whole in zip(ended, generate([1] * 40, params), strict=True):
        assert bool(o.token_ids) == (steps == 40)
        assert o.token_ids == whole.token_ids[: len(o.token_ids)]


def test_a_request_that_was_put_aside_ends_when_its_time_is_over():
    clock = Clock()
    running = engine(block_size=4, num_blocks=12, max_model_len=48, clock=clock)
    for timeout_s in (None, None, 5):
        running.add_request([1] * 6, params_of(max_tokens=40), timeout_s=timeout_s)
    while not any(s.request.index == 2 for s in running.scheduler.waiting if s.state is State.PREEMPTED):
        running.step()
    (ended,) = overdue(running, clock, 2)
    assert ended.finish_reason is FinishReason.TIMEOUT
    assert [state for state, _ in ended.history][-2:] == ["preempted", "finished"]
    assert len(finish(running)[0]) == 2


def test_a_deadline_dies_with_its_request():
    clock = Clock()
    running = engine(clock=clock)
    running.add_request([1], params_of(max_tokens=1), index=3, timeout_s=5)
    running.step()
    running.add_request([1], params_of(max_tokens=20), index=3)
    assert overdue(running, clock, 3) == []
    assert finish(running)[0][3, 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_over_at_once_is_refused(timeout):
    with pytest.raises(RequestError, match="timeout_s"):
        engine().add_request([1], params_of(), timeout_s=timeout)


# V01, V02: what the context holds


@pytest.mark.parametrize("cache", [{"kv_tokens": 48}, {"num_blocks": 3}, {"max_model_len": 48}])
@pytest.mark.parametrize("n", [1, 3])
def test_without_max_tokens_the_context_is_filled(cache, n):
    running = engine(**cache)
    assert running.max_model_len == 48
    running.add_request([5] * 20, params_of(max_tokens=None, n=n, bad_words=("\x05",)))
    outputs, _ = finish(running)
    assert [len(outputs[0, sample].token_ids) for sample in range(n)] == [28] * n
    running.add_request([5] * 48, params_of(max_tokens=0, prompt_logprobs=0))
    assert len(finish(running)[0][1, 0].prompt_logprobs) == 48
    for length, most in ((48, None), (49, 0), (48, 1), (VOCAB, 0)):
        with pytest.raises(RequestError, match=r"\b48\b"):
            running.add_request([5] * length, params_of(max_tokens=most))
