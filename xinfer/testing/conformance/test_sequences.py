"""A row of logits is that of its text alone: whoever shares the step, however the text was cut."""

__all__: list[str] = []

import numpy as np
import pytest

from xinfer.testing.conformance.checked import Checked
from xinfer.testing.conformance.subject import LONGEST, Subject
from xinfer.testing.stepper import cut

pytestmark = pytest.mark.quick


def test_logits_are_those_of_eager(subject: Subject, checked: Checked) -> None:
    """A prompt computed at once, on a tiny model; `test_families.py` has one of each family."""
    if not subject.computes_checkpoints:
        pytest.skip(f"backend {subject.backend.name} computes no checkpoint")
    for length in (1, 2, 16, 17, LONGEST):
        checked.step([checked.start(checked.text(length))], [length])


def test_decoding_continues_the_prompt(checked: Checked) -> None:
    """Tokens computed one by one come to what they come to within their text, at their own positions."""
    checked.greedy(checked.text(40), [40], 24)


def test_a_prompt_may_be_cut_anywhere(checked: Checked) -> None:
    """A piece of a prompt sees the pieces before it, which lie in the cache."""
    text = checked.text(80)
    for seed in range(4):
        checked.greedy(text, cut(80, np.random.default_rng(seed)), 4)


def test_sequences_of_any_length_share_a_step(checked: Checked) -> None:
    """Each attends to itself alone."""
    texts = [checked.text(length) for length in (1, 3, 40, 17, 64)]
    checked.step([checked.start(text) for text in texts], [*map(len, texts)])


def test_sequences_of_one_length_share_a_step(checked: Checked) -> None:
    """Also where there is nothing to be padded."""
    texts = [checked.text(24, seed) for seed in range(6)]
    sequences = [checked.start(text) for text in texts]
    checked.step(sequences, [24] * 6)
    for _ in range(4):
        for sequence in sequences:
            sequence.token_ids.append(int(checked.alone(sequence.token_ids)[-1].argmax()))
        checked.step(sequences, [1] * 6)


def test_their_order_in_a_step_may_change(checked: Checked) -> None:
    """A sequence is known by its blocks, not by its place in the batch."""
    sequences = [checked.start(checked.text(60, seed)) for seed in range(5)]
    rng = np.random.default_rng(0)
    for _ in range(8):
        order = rng.permutation(5)
        checked.step([sequences[i] for i in order], rng.integers(1, 8, 5).tolist())


def test_prompts_and_decoding_share_a_step(checked: Checked) -> None:
    """Some sequences bring one token, others a piece of their prompt."""
    decoding, prompt = checked.start(checked.text(50)), checked.start(checked.text(60, seed=1))
    checked.step([decoding], [30])
    for _ in range(6):
        checked.step([prompt, decoding], [9, 1])


def test_sequences_come_and_go(checked: Checked) -> None:
    """They join at different times, are cut at random, and decode between others' chunks."""
    checked.in_company([checked.text(length, seed=length) for length in (1, 3, 17, 40, 48)])
