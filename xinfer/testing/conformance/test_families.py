"""Every family's tiny model, as a folder and as a GGUF file, gives the logits that eager gives."""

__all__: list[str] = []

import numpy as np
import pytest

from xinfer.errors import UsageError
from xinfer.testing.conformance.checked import Alone, Checked
from xinfer.testing.conformance.subject import Models, Subject, judge
from xinfer.testing.shapes import SHAPES
from xinfer.testing.stepper import cut


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_familys_logits_are_those_of_eager(subject: Subject, models: Models, family: str, form: str) -> None:
    """A prompt in pieces and what is decoded after it, then sequences that come and go."""
    if not subject.computes_checkpoints:
        pytest.skip(f"backend {subject.backend.name} computes no checkpoint")
    try:
        model = models.written(family, form)
        session = subject.session(model)
        tolerance = subject.tolerance_of(session.runner)
    except (LookupError, UsageError) as reason:
        pytest.skip(str(reason))
    eager = judge().session(model)
    checked = Checked(session.runner, Alone(eager.runner), tolerance, strict=tolerance.each)
    checked.greedy(checked.text(48), cut(48, np.random.default_rng(1)), 8)
    checked.in_company([checked.text(length, seed=length) for length in (1, 3, 17, 40)], steps=12)
    if not checked.strict:  # where rounding chooses another expert a row is far off, so that only most can be near
        assert np.median(checked.used) <= 0.5, f"most rows take {np.median(checked.used):.2f} of what is allowed"
    session.close()
    eager.close()
