"""SmolLM2's greedy tokens on ONNX Runtime, against those of eager: pieces of the text that ships, continued."""

from pathlib import Path

import pytest
import torch
from cases import RUNNERS

from xinfer import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize.text import sample_text
from xinfer.testing.stepper import Stepper

PROMPT, NEW = 24, 64
MARGIN = 1e-3  # between eager's two likeliest tokens, below which the last digits decide


@pytest.fixture(scope="module")
def steppers(smollm2_path: Path) -> tuple[Stepper, Stepper, list[int]]:
    model = Model("smollm2", lambda: smollm2_path, xinfer_model_families(), dtype="float32")
    limits = Limits(max_model_len=PROMPT + NEW, max_num_seqs=1, max_num_batched_tokens=512, kv_memory=64e6)
    eager, onnx = (Stepper(RUNNERS[name](model, limits)) for name in ("eager", "onnx"))
    return eager, onnx, model.tokenizer.encode(sample_text())


def differences(steppers: tuple[Stepper, Stepper, list[int]], count: int) -> list[str]:
    """Continue so many prompts; tell of each one that parts from eager's tokens where, and by what margin."""
    eager, onnx, ids = steppers
    found = []
    for number in range(count):
        start = number * (len(ids) - PROMPT) // 20
        tokens, logits = eager.greedy(ids[start : start + PROMPT], [PROMPT], NEW)
        others, _ = onnx.greedy(ids[start : start + PROMPT], [PROMPT], NEW)
        assert len(tokens) == len(others) == NEW
        parts = [place for place, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]]
        if parts:
            best, second = torch.topk(logits[PROMPT - 1 + parts[0]], 2).values.tolist()
            found.append(f"prompt {number} at token {parts[0]}: eager's margin is {best - second:.2g}")
            assert best - second < MARGIN, found[-1]
    return found


def test_a_few_prompts_are_continued_as_by_eager(steppers) -> None:
    assert differences(steppers, 3) == []


@pytest.mark.slow
def test_twenty_prompts_are_continued_as_by_eager(steppers) -> None:
    print(*differences(steppers, 20), sep="\n")
