"""What a runner reports, and what every call of it must keep to, whatever is computed."""

__all__: list[str] = []

import threading
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from xinfer.engine.runner import LEVELS, ModelRunner
from xinfer.engine.types import Batch
from xinfer.testing.conformance.checked import Alone, Checked
from xinfer.testing.conformance.subject import LIMITS, LONGEST, Subject

pytestmark = pytest.mark.quick

CAPABILITIES = {"ahead", "copy", "decode_differs", "free", "layers"}
LENGTHS = (1, 5, 17, 30)


def batch_of(checked: Checked) -> Batch:
    """Return a batch of several new sequences, whose blocks the next one may have."""
    sequences = [checked.start(checked.text(length)) for length in LENGTHS]
    batch = checked.batch(sequences, [*LENGTHS])
    for sequence in sequences:
        checked.finish(sequence)
    return batch


def test_info_says_what_can_be(runner: ModelRunner) -> None:
    """Capacities are positive and fit together; levels and capabilities are those that there are."""
    info = runner.info
    for name in ("vocab_size", "max_model_len", "block_size", "num_blocks", "hash_size", "kv_tokens"):
        assert getattr(info, name) > 0, f"RunnerInfo.{name} must be above zero"
    assert info.kv_tokens <= info.num_blocks * info.block_size, "RunnerInfo.kv_tokens: blocks hold no more than this"
    assert info.levels <= LEVELS, f"RunnerInfo.levels: there are {sorted(LEVELS)}"
    assert info.capabilities <= CAPABILITIES, f"RunnerInfo.capabilities: there are {sorted(CAPABILITIES)}"
    for name in ("resident_weight_bytes", "kv_cache_bytes", "step_read_bytes", "kv_token_bytes"):
        assert getattr(info, name) >= 0, f"RunnerInfo.{name} must not be negative"


def test_a_checkpoints_context_is_no_longer_than_asked_for(subject: Subject, runner: ModelRunner) -> None:
    """A backend that computes checkpoints keeps to `Limits.max_model_len`, for which memory is divided."""
    if not subject.computes_checkpoints:
        pytest.skip(f"backend {subject.backend.name} computes no checkpoint")
    assert runner.info.max_model_len == LONGEST


def test_logits_are_float32_rows_of_the_vocabulary(checked: Checked) -> None:
    """One row for each token asked for, as wide as the vocabulary."""
    logits = checked.forward(batch_of(checked))
    assert isinstance(logits, torch.Tensor)


def test_a_step_may_want_no_logits(checked: Checked) -> None:
    """A piece of a prompt that does not end it has no row: then K is 0."""
    batch = batch_of(checked)
    logits = checked.forward(replace(batch, sample_at=batch.sample_at[:0]))
    assert logits.shape == (0, checked.runner.info.vocab_size)


def test_logits_are_numbers(checked: Checked) -> None:
    """No NaN, nothing infinite but what can't come at all, and not all the same."""
    logits = checked.forward(batch_of(checked)).cpu()
    assert not logits.isnan().any(), "there are NaN among the logits"
    assert not (logits == torch.inf).any(), "there are infinite logits"
    assert (logits > -torch.inf).any(1).all(), "there is a row in which no token can come"


def test_logits_belong_to_the_tokens_of_sample_at(checked: Checked) -> None:
    """Row k is that of the token `sample_at[k]`, whichever are asked for."""
    texts = [checked.text(length) for length in LENGTHS]
    rows = torch.cat([checked.alone(text) for text in texts])
    for seed in range(3):
        batch = batch_of(checked)
        count = len(batch.token_ids)
        places = np.sort(np.random.default_rng(seed).choice(count, count // 3, replace=False)).astype(np.int32)
        logits = checked.forward(replace(batch, sample_at=places))
        for row, place in enumerate(places.tolist()):
            checked.compare(batch, place, logits[row : row + 1], rows[place : place + 1])


def test_the_batch_is_left_as_it_is(checked: Checked) -> None:
    """Its arrays are the engine's."""
    batch = batch_of(checked)
    before = deepcopy(batch)
    checked.forward(batch)
    for field in fields(Batch):
        same = np.array_equal(getattr(batch, field.name), getattr(before, field.name))
        assert same, f"forward has changed Batch.{field.name}"


def test_rows_that_were_returned_stay_as_they_are(checked: Checked) -> None:
    """The tensor is the caller's; the next step must not be written into it."""
    first, second = checked.start(checked.text(20)), checked.start(checked.text(20, seed=1))
    rows = checked.step([first], [20])[0]
    kept = rows.clone()
    checked.step([second], [20])
    assert torch.equal(rows, kept), "a later step has changed the logits of an earlier one"


def test_the_largest_step_that_the_limits_allow(checked: Checked) -> None:
    """All sequences, all tokens and all rows of logits at once."""
    most, count = LIMITS["max_num_batched_tokens"], LIMITS["max_num_seqs"]
    count = min(count, checked.runner.info.num_blocks)
    texts = [checked.text(min(most // count, LONGEST), seed) for seed in range(count)]
    checked.step([checked.start(text) for text in texts], [*map(len, texts)])


def test_it_steps_in_another_thread_than_it_was_made_in(checked: Checked) -> None:
    """A program's engine steps in a thread of its own."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            checked.greedy(checked.text(20), [15, 5], 4)
        except BaseException as error:  # pytest's failures are no Exceptions
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_two_runners_do_not_disturb_each_other(
    subject: Subject, main_model: Path | None, checked: Checked, alone: Alone
) -> None:
    """A smaller model that guesses tokens runs beside the larger one."""
    first = checked.start(checked.text(40))
    checked.step([first], [30])
    session = subject.session(main_model)
    other = Checked(session.runner, alone, checked.tolerance)
    other.greedy(other.text(40, seed=1), [40], 4)
    checked.step([first], [10])
    session.close()
    checked.step([checked.start(checked.text(17))], [17])


def test_tokens_that_only_the_device_knows_are_taken(checked: Checked) -> None:
    """An id of -1 - i means entry i of `Batch.drawn`, wherever it stands; for one that is none any token will do."""
    runner = checked.runner
    if "ahead" not in runner.info.capabilities:
        pytest.skip("RunnerInfo.capabilities does not name ahead")
    sequences = [checked.start(checked.text(length)) for length in (20, 9, 4)]
    batch = checked.batch(sequences, [20, 9, 4])
    token_ids = batch.token_ids.copy()
    drawn = torch.tensor([token_ids[28], -1, token_ids[19], token_ids[3]], device=runner.info.device)
    token_ids[[28, 19, 3, 32]] = -1, -3, -4, -2
    logits = checked.forward(replace(batch, token_ids=token_ids, drawn=drawn.long()))
    for sequence, first in zip(sequences[:2], (0, 20), strict=True):
        expected = checked.alone(sequence.token_ids)
        checked.compare(batch, first, logits[first : first + len(expected)], expected)
    assert logits[32].isfinite().all(), "a token that is none is no reason for logits that are no numbers"


def test_layers_are_told_of_every_token(checked: Checked) -> None:
    """What goes into each layer and out of the last, float32 on the host, and the cache is filled as by a step."""
    runner = checked.runner
    if "layers" not in runner.info.capabilities:
        pytest.skip("RunnerInfo.capabilities does not name layers")
    sequence = checked.start(checked.text(30))
    told = runner.layers(checked.batch([sequence], [20]))
    assert len(told) >= 2
    for layer in told:
        assert (layer.dtype, layer.device.type) == (torch.float32, "cpu"), "layers are float32 on the host"
        assert layer.shape[:-1] == (20,), "a layer has a row for every token of the batch"
        assert layer.isfinite().all(), "a layer's output is no number"
    sequence.num_computed = 20
    checked.step([sequence], [10])
