"""What does engine.determinism=invariant cost? Same weights, same requests, alternating rounds.

    python experiments/determinism_price.py [--dtypes float32,bfloat16] [--rounds 5]

`prefill` is one prompt of 512 tokens until its first token, `decode N` the time per step of N sequences of 64 + 64
tokens at once, prefill left out. Quoted are medians, and the median of the rounds' ratios.
"""

import argparse
import random
import statistics
from datetime import date

import torch

from xinfer import Engine, Limits, SamplingParams, hardware
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.composing import default_model
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.sources import resolve

LEVELS = ("fast", "invariant")


def runner(dtype: str, determinism: str) -> TorchRunner:
    path = resolve(default_model())
    model = Model(str(path), lambda: path, xinfer_model_families(), dtype=dtype)
    return TorchRunner(BackendContext(model, EagerConfig(), Limits(determinism=determinism)))


def measure(runner: TorchRunner, determinism: str, rows: int, prompt: int, new: int, seed: int) -> tuple[float, float]:
    """Milliseconds until the first token, and of a median decode step."""
    draw = random.Random(seed)
    engine = Engine(runner, None, Limits(determinism=determinism, prefix_cache=False))
    for _ in range(rows):
        ids = [draw.randrange(100, 40_000) for _ in range(prompt)]
        engine.add_request(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    steps = [step.stats for step in engine.run()]
    first = sum(s.step_ms for s in steps if s.stage != "decode")
    decode = [s.step_ms for s in steps if s.stage == "decode"]
    return first, statistics.median(decode) if decode else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    machine, versions = hardware.describe(), hardware.versions()
    print(f"{machine.cpu}, {torch.get_num_threads()} threads, torch {versions['torch']}, {date.today()}\n")
    print("| precision | work | fast ms | invariant ms | price |\n| --- | --- | --- | --- | --- |")
    works = {"prefill": (1, 512, 1)} | {f"decode {n}": (n, 64, 64) for n in (1, 8, 32)}
    for dtype in options.dtypes.split(","):
        runners = {level: runner(dtype, level) for level in LEVELS}
        for name, (rows, prompt, new) in works.items():
            times: dict[str, list[float]] = {level: [] for level in LEVELS}
            for turn in range(options.rounds + 1):
                for level in LEVELS:
                    took = measure(runners[level], level, rows, prompt, new, turn)
                    times[level].append(took[0 if name == "prefill" else 1])
            fast, invariant = (times[level][1:] for level in LEVELS)  # the first round warms up
            price = statistics.median(b / a for a, b in zip(fast, invariant, strict=True)) - 1
            medians = f"{statistics.median(fast):.1f} | {statistics.median(invariant):.1f}"
            print(f"| {dtype} | {name} | {medians} | {price:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
