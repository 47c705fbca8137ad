"""What one or several processes make of a prompt; a program for torchrun: FOLDER FAMILY BACKEND FILE."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xinfer.backends import BackendContext
from xinfer.backends.torch import CompileConfig, EagerConfig, create, create_compiled
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme
from xinfer.processes import count
from xinfer.testing.stepper import Stepper, cut

# How weights are held, besides whole and in float32.
HELD: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"stream_layers": 2},
    "qwen2": {"quantization": Scheme.configured("int8", method="rtn", block=32)},
}


def steps(folder: Path, family: str, backend: str) -> dict[str, Any]:
    """Return a text's token ids, the logits after each but the last, and the bytes of the weights."""
    model = Model(str(folder), lambda: folder, xinfer_model_families(), **HELD.get(family, {}))
    limits = Limits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=512, kv_memory=16e6)
    make, config = (create_compiled, CompileConfig) if backend == "compile" else (create, EagerConfig)
    stepper = Stepper(make(BackendContext(model, config(device="cpu"), limits, count())))
    prompt = np.random.default_rng(0).integers(0, model.spec.vocab_size, 40).tolist()
    first, _ = stepper.greedy(prompt, [40], 4)
    tokens, rows = stepper.greedy(prompt, cut(40, np.random.default_rng(1)), 16)
    assert tokens[:4] == first
    stepper.runner.close()
    return {"ids": prompt + tokens, "rows": rows, "bytes": stepper.runner.info.resident_weight_bytes}


if __name__ == "__main__":
    torch.save(steps(Path(sys.argv[1]), sys.argv[2], sys.argv[3]), sys.argv[4])
