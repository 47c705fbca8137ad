r"""How fast is each backend and precision, beside other engines, on the same weights and machine?

    python experiments/speed.py "backend=onnx model.quantization=int4" "backend=onnx" \
        --peer llama:Q4_0 "PATH/run llama:Q4_0" --rounds 3 [--save FILE.json]

Each argument is a line of overrides, as for `python -m xinfer`. A peer is a name and a command that does the same work
and prints one JSON object with `prefill_tok_s`, `decode_tok_s` and `batch_tok_s`. All are processes of their own and
take turns, round after round, so that a busy machine disturbs all alike; a round's figure is the best of three, quoted
is the median of the rounds, and ratios are medians of the rounds' own.

The work: `prefill`, one prompt of 512 tokens until its first token; `decode`, 128 further tokens after a prompt of 32;
`batch`, 32 requests of 64 + 64 tokens at once, prefill included. Token ids are random, tokens the likeliest,
end-of-sequence ignored; sampling, text and everything else that `LLM` does is part of it. `share` is what part of the
memory bandwidth that this machine was once measured to have (`python -m xinfer device`) decoding uses for weights.

`--save` keeps every round's figures, with command, machine, versions and date, for `speed_picture.py` to draw: the file
is replaced whole after each round, so that what breaks off keeps the rounds that it finished, and a file that is there
already gets this sitting added. A peer's name must then end in its precision, as `llama:Q8_0` or `vllm:bf16` do. Of
absolute paths only the last part is kept.
"""

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from speed_sittings import (
    COMMAND,
    KINDS,
    Round,
    Sitting,
    median,
    precision,
    ratio,
    read,
    refuse,
    save,
    without_folders,
)

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
    info, chosen = llm.info, llm.config.model
    llm.close()
    file, kind = Path(chosen.reference.partition("#")[0]).name, chosen.quantization or info.dtype
    return figures | {
        "backend": llm.config.backend.name,
        "model": re.sub(r"([.-](q\d\w*|bf16|f16|f32))?\.gguf$", "", file, flags=re.IGNORECASE),
        "precision": precision(kind) or kind,
        "dtype": info.dtype,
        "step_read_bytes": info.step_read_bytes,
        "resident_weight_bytes": info.resident_weight_bytes,
    }


def run(command: list[str]) -> dict[str, Any]:
    """Return the figures that a command prints as its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    if missing := [kind for kind in KINDS if not found.get(kind)]:
        raise SystemExit(f"{shlex.join(command)} says nothing of {', '.join(missing)}: {lines[-1]}")
    return found


def sitting_here(command: Sequence[str], peers: Sequence[str]) -> Sitting:
    """Return a sitting without rounds; memory is measured if it never was."""
    import torch

    import xinfer
    from xinfer import hardware
    from xinfer.models.cache import cache_folder
    from xinfer.records.provenance import git_state

    machine = asdict(hardware.describe())
    return Sitting(
        command=without_folders(shlex.join(command)),
        started=datetime.now().isoformat(timespec="seconds"),
        machine={key: machine[key] for key in ("cpu", "threads", "physical_cores", "torch_kernels", "memory")},
        versions=hardware.versions(),
        git=git_state(Path(xinfer.__file__).parent),
        read_bytes_s=hardware.speed(torch.device("cpu"), cache=cache_folder()).read_bytes_s,
        peers={name: precision(name) or "" for name in peers},
        work={kind: list(counts) for kind, counts in WORK.items()},
        times=TIMES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", help="overrides, in one argument each")
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="keep every round's figures, for the picture")
    parser.add_argument("--one", action="store_true", help="measure the only configuration in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(shlex.split(options.configurations[0]))))
        return
    commands = {without_folders(line): [sys.executable, __file__, line, "--one"] for line in options.configurations}
    for name, command in options.peer:
        if options.save and precision(name) is None:
            refuse(f"--peer {name}: to be saved, its name must end in a precision, as llama:Q8_0 or vllm:bf16 do")
        commands[name] = shlex.split(command)
    if not 0 < len(commands) == len(options.configurations) + len(options.peer):
        parser.error("nothing is to be measured, or two things have one name")
    before = read(options.save) if options.save and options.save.exists() else []
    sitting = sitting_here(["python", COMMAND, *sys.argv[1:]], [name for name, _ in options.peer])
    if options.save:
        try:
            save(options.save, [*before, sitting])  # what can't be written is better known before than after
        except OSError as error:
            refuse(f"{options.save} can't be written: {error.strerror}")
    for _ in range(options.rounds):
        found: Round = {}
        for name, command in commands.items():
            found[name] = run(command)
            print(name, found[name], file=sys.stderr, flush=True)
        sitting.rounds.append(found)
        if options.save:
            save(options.save, [*before, sitting])
    report(sitting, list(commands))


def report(sitting: Sitting, names: list[str]) -> None:
    """Print medians, and each configuration's ratios to each peer."""
    rounds = sitting.rounds
    runtime = next((word for word in ("onnxruntime-gpu", "onnxruntime") if word in sitting.versions), "onnxruntime")
    print(
        f"{sitting.on}, onnxruntime {sitting.versions.get(runtime)}, torch {sitting.versions['torch']}, "
        f"{sitting.started[:10]}, {len(rounds)} rounds; memory is read at {sitting.read_bytes_s / 1e9:.0f} GB/s\n"
    )
    head = ["", "prefill tok/s", "decode tok/s", "share", "batch tok/s", "load s"]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for name in names:
        prefill, decode, batch = (median(rounds, name, kind) for kind in KINDS)
        share, load = "", ""
        if name not in sitting.peers:
            share = f"{decode * rounds[0][name]['step_read_bytes'] / sitting.read_bytes_s:.0%}"
            load = f"{median(rounds, name, 'load_s'):.1f}"
        print(f"| {name} | {prefill:.0f} | {decode:.1f} | {share} | {batch:.0f} | {load} |")
    ours = [name for name in names if name not in sitting.peers]
    if ours and sitting.peers:
        print("\n| ratio | prefill | decode | batch |\n| --- | --- | --- | --- |")
    for name in ours:
        for peer in sitting.peers:
            ratios = [ratio(rounds, name, peer, kind) for kind in KINDS]
            print(f"| {name} / {peer} | " + " | ".join(f"{each:.2f}" for each in ratios) + " |")


if __name__ == "__main__":
    main()
