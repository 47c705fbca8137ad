"""The conformance kit passes a backend that is right, and fails each wrong one by the test that is named for it."""

import re
import sys

import pytest
from broken import CAUGHT_BY, RunsAhead, TakesNamesForTokens

from xinfer.backends import Backend
from xinfer.backends.torch import EagerConfig, supports

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kit(conformance_kit):
    """Run the kit, or one of its tests, on a backend; the broken runners are backends of a plugin."""
    return conformance_kit(
        [Backend(wrong.__name__, EagerConfig, wrong, "wrong", supports=supports) for wrong in (*CAUGHT_BY, RunsAhead)]
    )


def test_a_backend_that_is_right_passes(kit, capfd: pytest.CaptureFixture[str]):
    found = kit("eager", "-m", "quick")
    assert (found.code, found.failed) == (0, {})
    unnamed = ["test_freed_blocks_harm_no_other", "test_tokens_that_only_the_device_knows_are_taken"]
    assert sorted(found.skipped) == unnamed
    named = {name.partition("::")[2] for name in CAUGHT_BY.values()}
    assert named - {"test_memory_is_given_back_on_close"} <= {*found.passed, *found.skipped}
    assert "tokens/s" in capfd.readouterr().out


def test_what_a_runner_says_it_can_is_tried(kit):
    test = CAUGHT_BY[TakesNamesForTokens]
    assert [*kit("RunsAhead", tests=test).passed] == [test.partition("::")[2]]


def test_a_failure_shows_the_batch_what_was_got_and_what_was_expected(kit):
    found = kit("ReturnsTheLastRows", tests="test_contract::test_logits_belong_to_the_tokens_of_sample_at")
    (text,) = found.failed.values()
    for part in (
        r"the logits of sequence \d at position \d+ \(token id \d+, place \d+ of the batch\)",
        r"largest difference  [\d.]+ at id \d+: -?[\d.]+ instead of -?[\d.]+; the row is off by [\d,.e+]+ times",
        r"got       (\d+: -?[\d.]+  ){5}",
        r"expected  (\d+: -?[\d.]+  ){5}",
        r"the batch, of 53 new tokens:",
        r"sequence 3: positions 0 to 29 of 30, slots [\d, -]+, blocks \[\d+, \d+\]",
    ):
        assert re.search(part, text), text
    assert len(text.splitlines()) <= 12


def test_what_is_misspelt_is_refused_with_what_was_meant(kit, capfd: pytest.CaptureFixture[str]):
    assert kit("eagre").code == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'eager'" in capfd.readouterr().err
    assert kit("eager", "--backend-key=devise=cpu").code == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'backend.device'" in capfd.readouterr().err
    assert kit("eager", "--model-family=lama").code == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'llama'" in capfd.readouterr().err


def test_a_family_can_be_chosen_and_needs_no_transformers(kit, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = kit("eager", "--model-family", "mixtral", "--model-family", "qwen3", tests="test_families")
    (family,) = found.passed
    assert (found.passed[family], found.skipped[family]) == (3, 1)  # mixtral's GGUF file is made by transformers


# Of those that the same test finds out, the first.
FIRST = {name: wrong for wrong, name in reversed(CAUGHT_BY.items())}.values()
SLICE = [
    pytest.param(wrong, marks=() if wrong in FIRST else pytest.mark.slow, id=wrong.__name__) for wrong in CAUGHT_BY
]


@pytest.mark.parametrize("wrong", SLICE)
def test_a_wrong_runner_fails_by_name(kit, wrong: type):
    found = kit(wrong.__name__, tests=CAUGHT_BY[wrong])
    assert [*found.failed] == [CAUGHT_BY[wrong].partition("::")[2]]
