"""What is told of a token: nothing smaller than its margin flips it, and what it says could come can come."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.engine.decision import decide, prepared, reach, stages
from xinfer.engine.random import uniform
from xinfer.engine.sampler import Sampler, sample
from xinfer.engine.types import Request, SamplingParams, Sequence

VOCAB = 40


def sequence(params: SamplingParams, seed: int = 0, tokens: tuple[int, ...] = (1, 2, 3)) -> Sequence:
    return Sequence(Request("0", 0, tokens, params, seed), list(tokens), 512)


@st.composite
def decisions(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(0, draw(st.sampled_from([0.5, 2.0, 6.0])), VOCAB).astype(np.float32)
    if draw(st.booleans()):
        row = np.round(row * 2) / 2  # ties, and logits as far apart as others
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 20])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.1])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3])),
    )
    return torch.from_numpy(row), sequence(params, draw(st.integers(0, 2**64 - 1))), rng


def drawn(row: torch.Tensor, of: Sequence) -> int:
    return sample(row[None], [of])[0]


def changed(row: torch.Tensor, rng: np.random.Generator, size: float) -> torch.Tensor:
    """The row with each logit changed by at most so much, at random or by all of it up or down, as float64 has it."""
    steps = rng.uniform(-1, 1, VOCAB) if rng.random() < 0.3 else rng.choice([-1.0, 1.0], VOCAB)
    if rng.random() < 0.4:  # what flips most: all below an id against all above it
        steps = np.where(np.arange(VOCAB) < rng.integers(VOCAB), 1.0, -1.0) * rng.choice([-1, 1])
    return (row.double() + torch.from_numpy(steps * size)).float()


@settings(max_examples=300)
@given(decisions())
def test_nothing_smaller_than_its_margin_flips_a_token(drawing):
    row, of, rng = drawing
    found = decide(row, of)
    assert found.token_id == drawn(row, of)
    size = min(found.margin, 30.0) * (1 - 1e-4) - 2e-6  # float32 rounds what is added
    for _ in range(8):
        if size > 0:
            assert drawn(changed(row, rng, size), of) == found.token_id


@settings(max_examples=200)
@given(decisions())
def test_a_change_that_flips_a_token_is_no_smaller_than_the_reach_of_what_then_comes(drawing):
    row, of, rng = drawing
    came = drawn(row, of)
    assert reach(row, of, came) == 0
    for size in (0.01, 0.1, 0.5, 2.0):
        other = drawn(changed(row, rng, size), of)
        assert reach(row, of, other) <= size + 2e-6
        if other != came:
            assert decide(row, of).margin <= size + 2e-6


@given(decisions())
def test_the_interval_is_the_tokens_and_holds_the_draw(drawing):
    row, of, _ = drawing
    found = decide(row, of)
    if of.request.params.greedy:
        assert found.u is found.interval is None
        return
    assert found.u == uniform([of.request.seed], [3])[0]
    low, high = found.interval
    assert low <= found.u <= high <= 1 + 1e-12
    last = stages(row, prepared(row, of), of, VOCAB)[-1]
    chances = {token: share for token, _, share in last.top}
    assert math.isclose(high - low, chances[found.token_id], abs_tol=1e-9)
    assert math.isclose(low, sum(share for token, share in chances.items() if token < found.token_id), abs_tol=1e-9)


def test_of_two_the_margin_is_half_their_distance():
    row = torch.tensor([1.0, 3.0, 2.5, -5.0])
    found = decide(row, sequence(SamplingParams(temperature=0)))
    assert (found.token_id, found.instead) == (1, 2)
    assert math.isclose(found.margin, 0.25, rel_tol=1e-5)
    assert math.isclose(reach(row, sequence(SamplingParams(temperature=0)), 0), 1.0, rel_tol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_of_two_that_are_drawn_it_is_what_brings_the_border_to_the_draw(temperature: float):
    row = torch.tensor([0.3, 0.0]) * temperature
    border = float(row.double().div(temperature).softmax(0)[0])
    for seed in range(20):
        of = sequence(SamplingParams(temperature=temperature), seed)
        found = decide(row, of)
        odds = math.log(found.u / (1 - found.u)) - math.log(border / (1 - border))
        assert math.isclose(found.margin, abs(odds) * temperature / 2, rel_tol=1e-4)
        assert (found.token_id, found.instead) == ((0, 1) if found.u < border else (1, 0))


def test_a_token_behind_the_filters_needs_what_takes_it_past_them():
    row = torch.tensor([4.0, 3.0, 2.0, 1.0])
    of = sequence(SamplingParams(top_k=2), 0)
    assert reach(row, of, 2) >= (3.0 - 2.0) / 2
    assert reach(row, of, 3) >= (3.0 - 1.0) / 2


def test_what_a_mask_forbids_can_not_come():
    of = sequence(SamplingParams(temperature=0, allowed_token_ids=(2,)))
    of.adjusts = True
    row = prepared(torch.tensor([4.0, 3.0, 2.0, 1.0]), of)
    found = decide(row, of)
    assert (found.token_id, found.margin, found.instead) == (2, math.inf, None)
    assert reach(row, of, 0) == math.inf


def test_each_stage_that_does_something_is_told():
    params = SamplingParams(temperature=0.8, min_p=0.01, top_k=3, top_p=0.6, logit_bias={4: 2.0})
    of = sequence(params)
    of.adjusts = True
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -9.0])
    found = stages(logits, prepared(logits, of), of, 6)
    names = ["model", "penalties, bias, masks", "temperature 0.8", "min-p 0.01", "top-k 3", "top-p 0.6"]
    assert [stage.name for stage in found] == names
    assert [stage.kept for stage in found] == [6, 6, 6, 5, 3, 1]
    assert found[1].top[2] == (2, 2.0, pytest.approx(float(torch.tensor([4.0, 3, 2, 1, 2, -9]).softmax(0)[2])))
    assert [token for token, _, _ in found[4].top] == [0, 1, 2]
    greedy = stages(logits, logits, sequence(replace(params, temperature=0, logit_bias={})), 2)
    assert [(stage.name, stage.kept, len(stage.top)) for stage in greedy] == [("model", 6, 2), ("greedy", 1, 1)]


def test_processors_come_first():
    class Plus:
        name = "plus"

        def apply(self, logits, sequences):
            return logits + torch.arange(4.0)

    of = sequence(SamplingParams(temperature=0))
    row = prepared(torch.tensor([1.0, 0.5, 0.0, -2.5]), of, [Plus()])
    assert decide(row, of).token_id == Sampler([Plus()])(torch.tensor([[1.0, 0.5, 0.0, -2.5]]), [of])[0].token_id == 2
