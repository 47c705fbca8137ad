"""Models on disk as both sides read them, ours and transformers', and what is compared."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from xinfer.backends import BackendContext, onnx
from xinfer.backends.onnx import OnnxConfig
from xinfer.backends.onnx.runner import OnnxRunner
from xinfer.backends.torch import CompileConfig, EagerConfig
from xinfer.backends.torch.compiled import CompiledRunner
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Limits
from xinfer.engine.types import Sequence as Tokens
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.stepper import Stepper, cut
from xinfer.testing.tiny import write_folder

TOLERANCE = 1e-4
PROMPT, STEPS = 48, 32
SEED = 20

logging.getLogger("transformers").setLevel(logging.ERROR)


class Case:
    """A model on disk, as both sides read it."""

    def __init__(
        self,
        root: Path,
        config: dict[str, Any],
        seed: int = SEED,
        write: Callable[[Path, dict[str, Any], int], Any] = write_folder,
        max_len: int | None = None,
    ) -> None:
        self.root, self.config, self.seed, self.write, self.max_len = root, config, seed, write, max_len
        self.folder = root / "model"
        write(self.folder, config, seed)

    def reference(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    def prompt(self, length: int = PROMPT, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.config["vocab_size"], length).tolist()

    def ours(
        self,
        dtype: str = "float32",
        determinism: str = "fast",
        backend: str = "eager",
        held: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Stepper:
        """Return our side, of a config with these changes in it if there are any: the weights are the same.

        `held` is how they are held: further arguments of `Model`.
        """
        if not changes:
            return stepper(self.folder, dtype, determinism, self.max_len, backend, held)
        changed = self.root / "changed"
        changed.mkdir()
        (changed / "config.json").write_text(json.dumps(self.config | changes))
        for file in self.folder.glob("*.safetensors"):
            (changed / file.name).symlink_to(file)
        return stepper(changed, dtype, determinism, self.max_len, backend, held)

    def refusal(self, backend: str) -> str | None:
        """Return why a backend can't run it, or None where it can."""
        return None if backend != "onnx" else onnx.supports(model_of(self.folder).spec, OnnxConfig(device="cpu"))


def model_of(folder: Path, dtype: str = "float32", **held: Any) -> Model:
    return Model(str(folder), lambda: folder, xinfer_model_families(), dtype=dtype, **held)


def stepper(
    folder: Path,
    dtype: str,
    determinism: str,
    max_len: int | None = None,
    backend: str = "eager",
    held: dict[str, Any] | None = None,
) -> Stepper:
    """Return a runner whose cache is full of rubbish, and blocks in a random order (case N02)."""
    limits = Limits(
        max_model_len=max_len, max_num_seqs=8, max_num_batched_tokens=512, kv_memory=64e6, determinism=determinism
    )
    runner = RUNNERS[backend](model_of(folder, dtype, **(held or {})), limits)
    spoil(runner)
    return Stepper(runner)


def eager_runner(model: Model, limits: Limits, kv_dtype: str | None = None) -> TorchRunner:
    return TorchRunner(BackendContext(model, EagerConfig(device="cpu", kv_dtype=kv_dtype), limits))


def compiled_runner(model: Model, limits: Limits, kv_dtype: str | None = None) -> TorchRunner:
    return CompiledRunner(BackendContext(model, CompileConfig(device="cpu", kv_dtype=kv_dtype), limits))


def onnx_runner(model: Model, limits: Limits) -> OnnxRunner:
    return OnnxRunner(BackendContext(model, OnnxConfig(device="cpu", threads=1), limits))


RUNNERS: dict[str, Callable[[Model, Limits], TorchRunner | OnnxRunner]] = {
    "eager": eager_runner,
    "compile": compiled_runner,
    "onnx": onnx_runner,
    "eager int8": partial(eager_runner, kv_dtype="int8"),
    "eager fp8": partial(eager_runner, kv_dtype="fp8"),
    "compile int8": partial(compiled_runner, kv_dtype="int8"),
}


@torch.inference_mode()
def spoil(runner: TorchRunner | OnnxRunner) -> None:
    """Fill every slot of a new cache with what is no number."""
    if isinstance(runner, TorchRunner):
        slots = runner.pools
    else:
        slots = [tensor.movedim(2, 0) for tensor in runner._rows.tensors]
    for each in slots:
        if each.dtype.itemsize == 1:
            each.view(torch.int8).fill_(-1)  # scales that are no numbers
            continue
        each[0::3], each[1::3], each[2::3] = torch.nan, torch.inf, -torch.inf


@torch.inference_mode()
def expected(model: Any, token_ids: list[int], length: int = 0) -> Tensor:
    """Return the reference's logits at every position, computed all at once and without any cache.

    They are computed within a text of at least `length`, by which some models turn positions.
    """
    longer = token_ids + [0] * (length - len(token_ids))
    logits: Tensor = model(torch.tensor([longer]), use_cache=False).logits[0]
    return logits[: len(token_ids)].float()


def generated(model: Any, prompt: list[int], steps: int) -> list[int]:
    """Return the tokens that the reference generates greedily, with its own cache."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    return output[len(prompt) :]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference; NaN counts as infinite."""
    return float((ours - theirs).abs().nan_to_num(torch.inf).max())


def agrees(case: Case, length: int, seed: int, backend: str = "eager") -> None:
    """Compare the logits at every position of a text with transformers', both in float32, the reference in float64.

    Where large numbers all but cancel each other, as in models drawn at random, transformers is not exact either: ours
    may be twice as far from the reference as theirs are.
    """
    prompt, chunks = case.prompt(length, seed), cut(length, np.random.default_rng(seed))
    tokens, ours = case.ours(backend=backend).greedy(prompt, chunks, 6)
    theirs, exact = (expected(case.reference(dtype), prompt + tokens) for dtype in (torch.float32, torch.float64))
    tolerance = TOLERANCE * max(1.0, float(exact.std()))
    assert difference(ours, exact) <= max(tolerance, 2 * difference(theirs, exact))


def in_company(runner: Stepper, case: Case) -> list[tuple[Tokens, Tensor]]:
    """Return sequences of several lengths that share steps, and the logits at all positions that they came to."""
    return runner.in_company([case.prompt(length, seed=length) for length in (1, 3, 17, 40, PROMPT)])
