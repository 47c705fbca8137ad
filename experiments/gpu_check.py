"""Parity and speed of backend=eager on a device, with random weights alone: `experiments/gpu_check.sh` runs it.

Parity: tiny models of every family, and one of SmolLM2's shape, compute the same prompt and 32 greedy tokens on the
CPU in float32 and on the device in float32 and bfloat16. In float32 logits agree within 1e-3 of their deviation, and
tokens are the same (one is excused where the two likeliest are nearer than twice that). In bfloat16 the mean
difference stays under 5 % of the deviation. Speed: a prompt of 512 tokens, 128 tokens after 32, 32 requests of 64 + 64,
and 256 at once.
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

from xinfer import Engine, Limits, SamplingParams, hardware
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.tiny import tiny_config, write_folder

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}
WORK = {"prefill": (1, 512, 1), "decode": (1, 32, 129), "batch of 32": (32, 64, 64), "batch of 256": (256, 64, 64)}


def folder(root: Path, name: str) -> Path:
    """Return a model's folder: a tiny one with its weights, or one of a real shape with only a config."""
    path = root / name
    if not path.exists() and name in SHAPES:
        path.mkdir()
        common = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e5}
        (path / "config.json").write_text(json.dumps(common | SHAPES[name]))
    elif not path.exists():
        write_folder(path, tiny_config(name), seed=0)
    return path


def runner(root: Path, name: str, device: str, dtype: str, limits: Limits) -> TorchRunner:
    load = "dummy" if name in SHAPES else "auto"
    path = folder(root, name)
    model = Model(name, lambda: path, xinfer_model_families(), dtype=dtype, load_format=load)
    return TorchRunner(BackendContext(model, EagerConfig(device=device), limits))


def logits(made: ModelRunner, tokens: list[int], start: int) -> torch.Tensor:
    """Return the logits after each token from `start` on: a prefill up to there, then one step a token."""
    table = np.arange(-(-len(tokens) // made.info.block_size), dtype=np.int32)[None]
    rows = []
    for first, last in [(0, start), *((i, i + 1) for i in range(start, len(tokens)))]:
        places = np.arange(first, last)
        batch = Batch(
            token_ids=np.array(tokens[first:last], np.int32),
            positions=places.astype(np.int32),
            query_starts=np.array([0, last - first], np.int32),
            context_lens=np.array([last], np.int32),
            block_tables=table,
            slot_mapping=places.astype(np.int64),
            sample_at=np.array([last - first - 1], np.int32),
            adapters=np.zeros(1, np.int32),
        )
        rows.append(made.forward(batch).cpu())
    return torch.cat(rows)


def parity(root: Path, name: str, device: str) -> list[dict[str, Any]]:
    limits = Limits(max_model_len=128, max_num_seqs=1)
    reference = runner(root, name, "cpu", "float32", limits)
    vocabulary = reference.info.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, 48).tolist()
    engine = Engine(reference, None, limits)
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    tokens = [token.token_id for step in engine.run() for token in step.tokens]
    exact = logits(reference, prompt + tokens[:-1], len(prompt))
    spread = float(exact.std())
    rows = []
    for dtype in ("float32", "bfloat16"):
        got = logits(runner(root, name, device, dtype, limits), prompt + tokens[:-1], len(prompt))
        largest, mean = float((got - exact).abs().max()) / spread, float((got - exact).abs().mean()) / spread
        wrong = (got.argmax(1) != torch.tensor(tokens)).nonzero()[:, 0].tolist()
        best = exact.topk(2).values
        margins = [float(best[i, 0] - best[i, 1]) / spread for i in wrong]
        good = largest < 1e-3 and all(m < 2e-3 for m in margins) if dtype == "float32" else mean < 0.05
        row = {"model": name, "dtype": dtype, "largest": largest, "mean": mean, "tokens_differ": len(wrong)}
        rows.append(row | {"good": good})
    return rows


def seconds(made: ModelRunner, limits: Limits, rows: int, prompt: int, new: int) -> float:
    """Return how long requests of random prompts take, greedy."""
    rng, engine = np.random.default_rng(0), Engine(made, None, limits)
    for _ in range(rows):
        ids = rng.integers(0, made.info.vocab_size, prompt).tolist()
        engine.add_request(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    started = time.perf_counter()
    for _ in engine.run():
        pass
    return time.perf_counter() - started


def speed(root: Path, name: str, device: str, dtype: str, rounds: int) -> dict[str, Any]:
    limits = Limits(max_model_len=1024, max_num_seqs=256, max_num_batched_tokens=8192)
    made = runner(root, name, device, dtype, limits)
    seconds(made, limits, 1, 32, 4)
    rates: dict[str, Any] = {"model": name, "dtype": dtype}
    for work, (rows, prompt, new) in WORK.items():
        best = min(seconds(made, limits, rows, prompt, new) for _ in range(rounds))
        if work == "decode":
            best -= min(seconds(made, limits, rows, prompt, 1) for _ in range(rounds))
        rates[work] = (prompt if new == 1 else rows * (new - (work == "decode"))) / best
    rates["read_share"] = made.info.step_read_bytes * rates["decode"] / hardware.measure(made.device).read_bytes_s
    made.close()
    gc.collect()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself where there is no GPU")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is there: run this on a machine that has one, or try the script with --device cpu")
    started = time.perf_counter()
    shapes = options.shapes.split(",")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        checks = [
            row for m in ("llama", "mistral", "qwen2", "qwen3", shapes[0]) for row in parity(root, m, options.device)
        ]
        print("| model | precision | largest / std | mean / std | tokens that differ | |")
        print("| --- | --- | --- | --- | --- | --- |")
        for c in checks:
            verdict = "good" if c["good"] else "WRONG"
            differ = f"{c['tokens_differ']} | {verdict}"
            print(f"| {c['model']} | {c['dtype']} | {c['largest']:.1e} | {c['mean']:.1e} | {differ} |", flush=True)
        print(f"\n| model | precision | {' | '.join(WORK)} | bandwidth |\n| --- | --- | {'--- | ' * len(WORK)}--- |")
        speeds = []
        for shape in shapes:
            for dtype in ("float32", "bfloat16"):
                row = speed(root, shape, options.device, dtype, options.rounds)
                speeds.append(row)
                cells = " | ".join(f"{row[work]:.0f}" for work in WORK)
                print(f"| {shape} | {dtype} | {cells} | {row['read_share']:.0%} |", flush=True)
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
