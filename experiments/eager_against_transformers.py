"""How much faster than transformers is backend=eager? Same weights, same machine, alternating rounds.

    python experiments/eager_against_transformers.py [--dtypes float32,bfloat16] [--rounds 3]

The work: `prefill`, one prompt of 512 tokens until its first token; `decode`, 128 further tokens after a prompt of 32;
`batch`, 32 requests of 64 + 64 tokens at once, prefill included. Token ids are random and end-of-sequence is ignored.
Both run in one process on all cores and take turns, so that a busy machine disturbs both; quoted is the best of the
rounds for each, as the disturbances of a shared machine only ever add time, and the median of the rounds' ratios.
"""

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from xinfer import Engine, Limits, SamplingParams, hardware
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.composing import default_model
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.sources import resolve

Generate = Callable[[int, int, int], None]
WORK = {"prefill": (1, 512, 1), "decode": (1, 32, 129), "batch": (32, 64, 64)}  # rows, prompt tokens, new tokens
rng = random.Random(0)


def prompts(rows: int, length: int) -> list[list[int]]:
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(rows)]


def ours(path: Path, dtype: str) -> Generate:
    model = Model(str(path), lambda: path, xinfer_model_families(), dtype=dtype)
    limits = Limits()
    engine = Engine(TorchRunner(BackendContext(model, EagerConfig(), limits)), model.tokenizer, limits)

    def generate(rows: int, prompt: int, new: int) -> None:
        for ids in prompts(rows, prompt):
            engine.add_request(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
        for _ in engine.run():
            pass

    return generate


def theirs(path: Path, dtype: str) -> Generate:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model = model.to(getattr(torch, dtype)).eval()

    def generate(rows: int, prompt: int, new: int) -> None:
        with torch.inference_mode():
            ids = torch.tensor(prompts(rows, prompt))
            options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return generate


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rate(generate: Generate, name: str) -> float:
    """Tokens per second: prompt tokens for prefill, else generated ones; decode leaves the first token's time out."""
    rows, prompt, new = WORK[name]
    if name == "decode":
        first = seconds(lambda: generate(rows, prompt, 1))
        return (new - 1) / (seconds(lambda: generate(rows, prompt, new)) - first)
    return (prompt if name == "prefill" else rows * new) / seconds(lambda: generate(rows, prompt, new))


def compare(dtype: str, rounds: int) -> list[dict[str, object]]:
    path = resolve(default_model())
    engines = {"xinfer": ours(path, dtype), "transformers": theirs(path, dtype)}
    for generate in engines.values():
        generate(1, 32, 4)
    rows = []
    for name in WORK:
        rates: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(rounds):
            for engine, generate in engines.items():
                rates[engine].append(rate(generate, name))
        ratios = [a / b for a, b in zip(rates["xinfer"], rates["transformers"], strict=True)]
        best = {engine: max(values) for engine, values in rates.items()}
        rows.append({"dtype": dtype, "work": name, **best, "ratio": statistics.median(ratios)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    machine, versions = hardware.describe(), hardware.versions()
    print(f"{machine.cpu}, {machine.threads} threads, torch {versions['torch']}, {date.today()}\n")
    print("| precision | work | xinfer tok/s | transformers tok/s | ratio |\n| --- | --- | --- | --- | --- |")
    rows = []
    for dtype in options.dtypes.split(","):
        for row in compare(dtype, options.rounds):
            rows.append(row)
            figures = f"{row['xinfer']:.1f} | {row['transformers']:.1f} | {row['ratio']:.2f}"
            print(f"| {row['dtype']} | {row['work']} | {figures} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
