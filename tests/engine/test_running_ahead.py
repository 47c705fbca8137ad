"""On a runner that can, a step is computed before the tokens of the one before it are seen: nothing else changes."""

import pytest
import torch
from engines import engine, fake, finish, params_of, what

from xinfer.engine.sampler import Drawn
from xinfer.engine.types import FinishReason, Limits
from xinfer.testing.fake import FakeRunner

AHEAD = frozenset({"copy", "free", "ahead"})
LOOKING = {
    "penalties": {"repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 1.0}},
    "words": {"bad_words": ["x"]},
    "masks": {"allowed_token_ids": [1, 2, 3]},
    "least": {"min_tokens": 2},
    "logprobs": {"logprobs": 0},
    "prompt": {"prompt_logprobs": 0},
}


class Told(FakeRunner):
    """Writes down when it is called."""

    def __init__(self, events, **options):
        super().__init__(**options)
        self.events = events

    def forward(self, batch):
        self.events.append(("compute", batch.drawn is not None))
        return super().forward(batch)


@pytest.fixture
def events(monkeypatch):
    """What happens: steps that are computed, with whether a token is unseen; tokens that are seen."""
    events = []
    read = Drawn.read
    monkeypatch.setattr(Drawn, "read", lambda self: events.append("see") or read(self))
    return events


def test_the_next_step_is_computed_before_tokens_are_seen(events):
    running = engine(runner=fake(lambda **o: Told(events, **o), capabilities=AHEAD))
    running.add_request([1, 2, 3], params_of(max_tokens=4))
    finish(running)
    unseen = ("compute", True)
    assert events == [("compute", False), unseen, "see", unseen, "see", unseen, "see", "see"]


def test_a_runner_that_does_not_say_so_is_waited_for(events):
    running = engine(runner=fake(lambda **o: Told(events, **o)))
    running.add_request([1, 2, 3], params_of(max_tokens=3))
    finish(running)
    assert events == [("compute", False), "see"] * 3


@pytest.mark.parametrize("name", LOOKING)
def test_nothing_runs_ahead_while_a_request_looks_at_its_tokens(name):
    limits = Limits(max_num_seqs=4)
    running, waiting = (engine(limits, capabilities=c) for c in (AHEAD, AHEAD - {"ahead"}))
    for each in (running, waiting):
        each.add_request([1, 2, 3], params_of(max_tokens=30))
        each.step()
        each.add_request([4, 5], params_of(max_tokens=5, **LOOKING[name]))
    assert running.runs_ahead
    while any(s.request.index == 1 for s in [*running.scheduler.running, *running.scheduler.waiting]):
        running.step()
        assert not running.runs_ahead or "1" not in running._sequences
    running.step()
    assert running.runs_ahead
    theirs, _ = finish(waiting)
    mine, _ = finish(running)
    assert what(mine[0, 0]) == what(theirs[0, 0])


def test_a_surplus_token_is_never_told():
    """The step after the last token is computed already when that is seen to be the last."""
    running = engine(capabilities=AHEAD, script={3: 65, 4: 66, 5: 67, 6: 68}, eos=(67,))
    running.add_request([1, 2, 3], params_of(max_tokens=20, temperature=0))
    outputs, steps = finish(running)
    assert outputs[0, 0].token_ids == (65, 66, 67)
    assert outputs[0, 0].finish_reason is FinishReason.STOP
    assert [token.token_id for step in steps for token in step.tokens] == [65, 66, 67]
    assert running.runner.steps == 4
    assert not running.runs_ahead


def test_a_request_that_is_aborted_while_it_is_computed_leaves_nothing():
    running = engine(capabilities=AHEAD)
    running.add_request([1, 2, 3], params_of(max_tokens=20))
    running.add_request([4, 5], params_of(max_tokens=9))
    running.step()
    assert running.runs_ahead
    running.abort("0")
    outputs, _ = finish(running)
    assert outputs[0, 0].finish_reason is FinishReason.ABORT
    assert len(outputs[0, 0].token_ids) == 1
    assert len(outputs[1, 0].token_ids) == 9


def test_what_is_no_number_ends_its_request_alone():
    """Where there is no token, the next step is computed with some other, of which nobody hears."""
    running = engine(capabilities=AHEAD, nan_rows=lambda context: len(context) == 4 and context[0] == 1)
    running.add_request([1, 2, 3], params_of(max_tokens=9))
    running.add_request([4, 5, 6], params_of(max_tokens=9))
    outputs, _ = finish(running)
    assert outputs[0, 0].finish_reason is FinishReason.ERROR
    assert len(outputs[0, 0].token_ids) == 1
    assert len(outputs[1, 0].token_ids) == 9


def test_steps_count_what_they_did():
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=4)
    running, waiting = (engine(limits, capabilities=c) for c in (AHEAD, AHEAD - {"ahead"}))
    told = []
    for each in (running, waiting):
        for length in (7, 2, 5):
            each.add_request([9] * length, params_of(max_tokens=6))
        _, steps = finish(each)
        told.append(
            [sum(getattr(s.stats, n) for s in steps) for n in ("prefill_tokens", "decode_tokens", "generated_tokens")]
        )
    assert told[0] == told[1]


def test_a_batch_names_tokens_by_their_place_among_those_drawn():
    seen = []

    class Keeps(FakeRunner):
        def forward(self, batch):
            seen.append(batch)
            return super().forward(batch)

    running = engine(runner=fake(Keeps, capabilities=AHEAD))
    for first in (1, 4):
        running.add_request([first, 2, 3], params_of(max_tokens=3, temperature=0))
    output = running.step()
    assert seen[1].token_ids.tolist() == [-1, -2]
    assert seen[1].drawn.tolist() == [token.token_id for token in output.tokens]
    assert seen[1].drawn.dtype == torch.int64
