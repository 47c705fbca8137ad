"""Tiny checkpoints are what transformers takes them for."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig, create
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.checkpoint import write_checkpoint
from xinfer.testing.reference import reference_logits
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = {family.name: family for family in xinfer_model_families()}
ODD = ("gpt2", "gpt_neox", "gpt_oss", "phi3")  # transposed, by heads, by rows, fused
EVERY = [pytest.param(family, marks=() if family in ODD else pytest.mark.slow) for family in SHAPES]
LENGTH = 40


@pytest.mark.parametrize("family", EVERY)
def test_transformers_finds_all_weights_and_computes_what_eager_computes(family: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path, shape(family, SHAPES[family][0]), FAMILIES[family])
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    theirs, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(found.values()), found
    model = Model(str(folder), lambda: folder, FAMILIES.values(), dtype="float32")
    stepper = Stepper(create(BackendContext(model, EagerConfig(device="cpu"), Limits(max_model_len=64, kv_memory=1e7))))
    (rows,) = stepper.step([stepper.start(range(3, 3 + LENGTH))], [LENGTH])
    expected = reference_logits(theirs.eval(), list(range(3, 3 + LENGTH)))
    assert expected.std() >= 0.5
    assert (rows - expected).abs().max() <= 1e-4 * max(1.0, float(expected.std()))
