r"""How fast is each backend and precision, beside other engines, on the same weights and machine?

    python experiments/speed.py "backend=onnx model.quantization=int4" "backend=onnx" \
        --peer llama:Q4_0 "PATH/run llama:Q4_0" --rounds 3

Each argument is a line of overrides, as for `python -m xinfer`. A peer is a name and a command that does the same work
and prints one JSON object with `prefill_tok_s`, `decode_tok_s` and `batch_tok_s`. All are processes of their own and
take turns, round after round, so that a busy machine disturbs all alike; a round's figure is the best of three, quoted
is the median of the rounds, and ratios are medians of the rounds' own.

The work: `prefill`, one prompt of 512 tokens until its first token; `decode`, 128 further tokens after a prompt of 32;
`batch`, 32 requests of 64 + 64 tokens at once, prefill included. Token ids are random, tokens the likeliest,
end-of-sequence ignored; sampling, text and everything else that `LLM` does is part of it. `share` is what part of the
memory bandwidth that this machine was once measured to have (`python -m xinfer device`) decoding uses for weights.
"""

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date

WORK = {"prefill": (1, 512, 1), "decode": (1, 32, 129), "batch": (32, 64, 64)}  # rows, prompt tokens, new tokens
TIMES = 3


def measure(overrides: list[str]) -> dict[str, object]:
    """Return one configuration's figures, of this process."""
    from xinfer import LLM, SamplingParams

    rng = random.Random(0)
    started = time.perf_counter()
    llm = LLM(overrides=overrides)
    loaded = time.perf_counter() - started

    def seconds(rows: int, prompt: int, new: int) -> float:
        texts = [[rng.randrange(100, 40_000) for _ in range(prompt)] for _ in range(rows)]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(texts, params)
        return time.perf_counter() - start

    def best(rows: int, prompt: int, new: int) -> float:
        return min(seconds(rows, prompt, new) for _ in range(TIMES))

    seconds(1, 32, 4)
    first = best(1, 32, 1)
    rows, prompt, new = WORK["batch"]
    figures: dict[str, object] = {
        "prefill_tok_s": WORK["prefill"][1] / best(*WORK["prefill"]),
        "decode_tok_s": (WORK["decode"][2] - 1) / (best(*WORK["decode"]) - first),
        "batch_tok_s": rows * new / best(rows, prompt, new),
        "load_s": loaded,
    }
    info = llm.info
    llm.close()
    return figures | {"step_read_bytes": info.step_read_bytes, "resident_weight_bytes": info.resident_weight_bytes}


def run(command: list[str]) -> dict[str, float]:
    """Return the figures that a command prints as its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    if missing := {"prefill_tok_s", "decode_tok_s", "batch_tok_s"} - found.keys():
        raise SystemExit(f"{shlex.join(command)} says nothing of {', '.join(sorted(missing))}: {lines[-1]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="+", help="overrides, in one argument each")
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="measure the only configuration in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(shlex.split(options.configurations[0]))))
        return
    commands: dict[str, Callable[[], dict[str, float]]] = {}
    for line in options.configurations:
        commands[line] = lambda line=line: run([sys.executable, __file__, line, "--one"])
    for name, command in options.peer:
        commands[name] = lambda command=command: run(shlex.split(command))
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for name, command in commands.items():
            rounds[-1][name] = command()
            print(name, rounds[-1][name], file=sys.stderr, flush=True)
    report(rounds, list(commands), [name for name, _ in options.peer])


def report(rounds: list[dict[str, dict[str, float]]], names: list[str], peers: list[str]) -> None:
    """Print medians, and each configuration's ratios to each peer."""
    import onnxruntime
    import torch

    from xinfer import hardware
    from xinfer.models.cache import cache_folder

    machine = hardware.describe()
    speed = hardware.speed(torch.device("cpu"), cache=cache_folder())
    print(
        f"{machine.cpu}, {machine.threads} threads, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, "
        f"{date.today()}, {len(rounds)} rounds; memory is read at {speed.read_bytes_s / 1e9:.0f} GB/s\n"
    )
    head = ["", "prefill tok/s", "decode tok/s", "share", "batch tok/s", "load s"]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    kinds = ("prefill_tok_s", "decode_tok_s", "batch_tok_s")
    for name in names:
        each = {kind: statistics.median(found[name][kind] for found in rounds) for kind in kinds}
        share, load = "", ""
        if name not in peers:
            used = each["decode_tok_s"] * rounds[0][name]["step_read_bytes"] / speed.read_bytes_s
            share, load = f"{used:.0%}", f"{statistics.median(found[name]['load_s'] for found in rounds):.1f}"
        figures = [
            f"{each['prefill_tok_s']:.0f}",
            f"{each['decode_tok_s']:.1f}",
            share,
            f"{each['batch_tok_s']:.0f}",
            load,
        ]
        print(f"| {name} | " + " | ".join(figures) + " |")
    if peers:
        print("\n| ratio | prefill | decode | batch |\n| --- | --- | --- | --- |")
    for name in names:
        for peer in peers if name not in peers else []:
            ratios = [statistics.median(found[name][kind] / found[peer][kind] for found in rounds) for kind in kinds]
            print(f"| {name} / {peer} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
