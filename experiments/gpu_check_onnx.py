"""Parity and speed of backend=onnx on CUDA, with random weights alone: `experiments/gpu_check.sh` runs it.

Parity: tiny models that use each kind of layer compute five sequences in steps that mix prefill and decode, over blocks
in random order, and then decode them by captured graphs. The reference is backend=eager on the CPU in float32. The mean
difference of logits stays under 5 % of their deviation in bfloat16, under 1 % in float16. Speed: decode of one request
and of 32, with captured graphs and without.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_check import folder, seconds

from xinfer import Limits, hardware
from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig, supports
from xinfer.backends.onnx.cuda import CudaRunner
from xinfer.backends.onnx.providers import CUDA, choose, cuda_problem
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.runner import ModelRunner
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper

FEW = (
    "llama/plain mistral/window qwen3/usual gemma2/usual gemma3_text/usual cohere/normed gpt2/usual gpt_neox/usual "
    "olmo/clipped stablelm/normed phi3/partial ministral3/usual falcon/one_key_head deepseek_v3/usual"
)
ALLOWED = {"bfloat16": 0.05, "float16": 0.01}
LENGTHS = (150, 9, 40, 300, 77)
PLANS = (  # new tokens of each of the sequences, step by step
    (100, 0, 0, 256, 0),
    (49, 5, 20, 30, 0),
    (1, 1, 10, 7, 70),
    (0, 1, 1, 1, 1),
    (0, 1, 1, 1, 1),
    (0, 1, 1, 1, 1),
)


def model(root: Path, name: str, dtype: str) -> Model:
    """Return a tiny model of which only its config.json is there."""
    path = root / name.replace("/", "-")
    if not path.exists():
        path.mkdir()
        family, kind = name.split("/")
        config = shape(family, kind) | {"max_position_embeddings": 512}
        if "deepseek" in family:
            config["first_k_dense_replace"] = 99
        (path / "config.json").write_text(json.dumps(config))
    return Model(name, lambda: path, xinfer_model_families(), dtype=dtype, load_format="dummy")


def on_cuda(made: Model, limits: Limits, captured: bool = True) -> CudaRunner:
    config = OnnxConfig(providers=[{CUDA: {"enable_cuda_graph": int(captured)}}])
    return CudaRunner(BackendContext(made, config, limits), choose(config, made.dtype))


def rows(made: ModelRunner) -> torch.Tensor:
    """Return the logits at all positions that the plans compute."""
    rng, steps = np.random.default_rng(0), Stepper(made)
    running = [steps.start(rng.integers(0, made.info.vocab_size, length).tolist()) for length in LENGTHS]
    found: list[list[torch.Tensor]] = [[] for _ in running]
    for plan in PLANS:
        chosen = [i for i, count in enumerate(plan) if count]
        got = steps.step([running[i] for i in chosen], [plan[i] for i in chosen])
        for i, each in zip(chosen, got, strict=True):
            found[i].append(each.cpu())
    made.close()
    return torch.cat([each for part in found for each in part])


def parity(root: Path, name: str) -> list[dict[str, Any]]:
    limits = Limits(max_model_len=512, max_num_seqs=5, max_logits_rows=512)
    exact = rows(TorchRunner(BackendContext(model(root, name, "float32"), EagerConfig("cpu"), limits)))
    spread, found = float(exact.std()), []
    for dtype, allowed in ALLOWED.items():
        got = rows(on_cuda(model(root, name, dtype), limits))
        apart = (got - exact).abs() / spread
        row = {"model": name, "dtype": dtype, "largest": float(apart.max()), "mean": float(apart.mean())}
        found.append(row | {"good": row["mean"] < allowed})
    return found


def speed(root: Path, captured: bool, rounds: int) -> dict[str, Any]:
    limits = Limits(max_model_len=1024, max_num_seqs=32)
    path = folder(root, "135M")
    given = Model("135M", lambda: path, xinfer_model_families(), dtype="bfloat16", load_format="dummy")
    started = time.perf_counter()
    made = on_cuda(given, limits, captured)
    row: dict[str, Any] = {"captured": captured, "load_s": time.perf_counter() - started, "notes": made.info.notes}
    for batch in (1, 32):
        seconds(made, limits, batch, 32, 4)
        whole, first = (min(seconds(made, limits, batch, 32, new) for _ in range(rounds)) for new in (129, 1))
        row[f"batch of {batch}"] = batch * 128 / (whole - first)
    row["prefill of 512"] = 512 / min(seconds(made, limits, 1, 512, 1) for _ in range(rounds))
    made.close()
    gc.collect()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=FEW.replace(" ", ","), help="family/shape,...; or all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (problem := cuda_problem()) is not None:
        sys.exit(f"backend=onnx can't compute on CUDA: {problem}")
    started = time.perf_counter()
    names = options.models.split(",")
    if names == ["all"]:
        names = [f"{family}/{kind}" for family, kinds in SHAPES.items() for kind in kinds]
    with tempfile.TemporaryDirectory() as name:
        root, checks = Path(name), []
        print("| model | precision | largest / std | mean / std | |\n| --- | --- | --- | --- | --- |")
        for each in names:
            if (reason := supports(model(root, each, "auto").spec, OnnxConfig("cuda"))) is not None:
                print(f"| {each} | refused: {reason} | | | |")
                continue
            for c in parity(root, each):
                checks.append(c)
                verdict = "good" if c["good"] else "WRONG"
                print(f"| {each} | {c['dtype']} | {c['largest']:.1e} | {c['mean']:.1e} | {verdict} |", flush=True)
        speeds = [speed(root, captured, options.rounds) for captured in (True, False)]
    works = [key for key in speeds[0] if " of " in key]
    print(f"\n| 135M, bfloat16 | {' | '.join(works)} |\n| --- | {'--- | ' * len(works)}")
    for row in speeds:
        kind = "captured graphs" if row["captured"] else "without"
        print(f"| {kind} | {' | '.join(f'{row[work]:.0f}' for work in works)} |")
    good = all(check["good"] for check in checks)
    result = {
        "good": good,
        "hardware": asdict(hardware.describe()),
        "versions": hardware.versions(),
        "parity": checks,
        "tokens_per_second": speeds,
        "seconds": time.perf_counter() - started,
    }
    print(f"\n{'all good' if good else 'PARITY FAILED'} in {result['seconds']:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
