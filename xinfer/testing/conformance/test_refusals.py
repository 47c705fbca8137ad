"""What a backend must refuse before any work, in one line, and what it must not."""

__all__: list[str] = []

from dataclasses import is_dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from xinfer.errors import UsageError
from xinfer.models.families import xinfer_model_families
from xinfer.testing.conformance.subject import Subject
from xinfer.testing.shapes import SHAPES, shape

pytestmark = pytest.mark.quick


def test_its_keys_have_defaults(subject: Subject) -> None:
    """`backend=NAME` alone must be a configuration, be it one that is refused later."""
    assert is_dataclass(subject.backend.config), "Backend.config must be a dataclass"
    subject.backend.config()


def test_it_has_a_summary_of_one_line(subject: Subject) -> None:
    """For `python -m xinfer plugins` and `--help`."""
    assert subject.backend.summary.strip()
    assert len(subject.backend.summary.splitlines()) == 1


def test_supports_answers_for_every_family_without_reading_weights(subject: Subject) -> None:
    """It says in one line why not, or None; there is nothing but a description to look at."""
    for family in xinfer_model_families():
        for name in SHAPES.get(family.name, ()):
            reason = subject.backend.refusal(family.spec(shape(family.name, name)), subject.config.backend)
            assert reason is None or len(reason.splitlines()) == 1, f"{family.name}: {reason!r}"


def test_a_checkpoint_that_lacks_a_tensor_is_refused(subject: Subject, main_model: Path | None, tmp_path: Path) -> None:
    """It is never computed with something else in its place."""
    if main_model is None:
        pytest.skip(f"backend {subject.backend.name} computes no checkpoint")
    if main_model.is_file():
        pytest.skip(f"backend {subject.backend.name} takes no folders")
    tensors = load_file(main_model / "model.safetensors")
    del tensors[max(name for name in tensors if "layers." in name or ".h." in name)]
    (tmp_path / "config.json").write_bytes((main_model / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError):
        _ = subject.session(tmp_path).runner


def test_too_little_memory_is_refused(subject: Subject, main_model: Path | None) -> None:
    """A cache that can't hold a few tokens is a `DeviceError` when the runner is made, not a failure in a step."""
    session = subject.session(main_model, kv_memory=64.0)
    try:
        taken = session.runner.info.kv_cache_bytes
    except UsageError:
        return
    session.close()
    if taken:
        pytest.fail(f"engine.kv_memory is 64 bytes, but RunnerInfo.kv_cache_bytes is {taken:,}", pytrace=False)
    pytest.skip("RunnerInfo.kv_cache_bytes says that there is no cache to speak of")
