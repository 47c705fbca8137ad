r"""How often is identical code called slower, and how often is a tenth more time noticed?

    python experiments/bench_gate.py [--tries 40] [--stored 10] [--save FILE.json] [-- OVERRIDE ...]

Each try is one command, `python -m xinfer bench bench.against_checkout=...`, with processes of its own: this checkout
against itself, once as it is, and once with a plugin on the one side that makes each step a tenth more work: after it,
it turns in a loop for a tenth of the processor's time that the step took. The exit code counts: 1 is a regression.
`--stored` tries do the same by way of a stored baseline: one command writes it, one is held to it, so that what the
machine does in between counts as the code's.

The model is a tiny random one whose steps take less than a scheduler's slice of time, so that what else runs on the
machine delays few of them, and the median hardly. Overrides after `--` measure another (`model=smollm2`).
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARE = 0.10
SLOWED = f"""
from time import thread_time
from xinfer import hookimpl

last = thread_time()

@hookimpl
def xinfer_on_step(step):
    global last
    now = thread_time()
    until = now + {SHARE} * (now - last)
    while thread_time() < until:
        pass
    last = thread_time()
"""


def plant(folder: Path) -> Path:
    """Write the plugin as a distribution that is found by PYTHONPATH alone."""
    info = folder / "xinfer_slowed-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xinfer-slowed\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[xinfer]\nslowed = xinfer_slowed\n")
    (folder / "xinfer_slowed.py").write_text(SLOWED)
    return folder


def bench(overrides: list[str], *before: Path) -> tuple[int, str]:
    """Run the task with these folders before the checkout; return its exit code and standard output."""
    path = os.pathsep.join(map(str, (*before, ROOT)))
    command = [sys.executable, "-P", "-m", "xinfer", "bench", *overrides, "record=none", "log.level=error"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.returncode, done.stdout


def outcome(code: int, text: str) -> dict[str, Any]:
    """Return what a try came to: exit code, and ratio, interval and verdict of each statistic."""
    found = re.findall(r"ITL (\w+) \S+ and \S+ ms, ratio (\S+) \[(\S+), (\S+)\] of \d+ repeats ?(\w*)", text)
    ratios = {name: [float(ratio), float(low), float(high), verdict] for name, ratio, low, high, verdict in found}
    return {"exit_code": code, "ratios": ratios, "grown": "grew from" in text}


def interleaved(overrides: list[str], before: tuple[Path, ...]) -> dict[str, Any]:
    return outcome(*bench([*overrides, f"bench.against_checkout={ROOT}"], *before))


def stored(overrides: list[str], before: tuple[Path, ...], folder: Path) -> dict[str, Any]:
    file = folder / "baseline.json"
    bench([*overrides, f"bench.save_baseline={file}"])
    return outcome(*bench([*overrides, f"bench.baseline={file}"], *before))


def tiny(folder: Path) -> list[str]:
    from xinfer.testing.tiny import tiny_config, write_folder

    model = write_folder(folder, tiny_config("llama", num_hidden_layers=10), seed=0)
    return ["model=custom", f"model.reference={model}", "backend.threads=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--stored", type=int, default=10)
    parser.add_argument("--work", default="tg32")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("overrides", nargs="*", help="of another model, after --")
    options = parser.parse_args()
    from xinfer import hardware
    from xinfer.records.provenance import git_state
    from xinfer.records.record import write_json

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = options.overrides or tiny(folder / "model")
        overrides = [*model, f"bench.tests={options.work}", f"bench.repeats={options.repeats}"]
        slowed = (plant(folder / "slowed"),)
        machine, started = hardware.describe(), time.perf_counter()
        study: dict[str, Any] = {
            "study": "experiments/bench_gate.py",
            "started": datetime.now().isoformat(timespec="seconds"),
            "model": options.overrides or "tiny llama, 10 layers, float32, backend=eager, one thread",
            "work": options.work,
            "repeats": options.repeats,
            "planted": SHARE,
            "machine": {"cpu": machine.cpu, "logical_cores": machine.logical_cores},
            "versions": hardware.versions(),
            "git": git_state(ROOT / "xinfer"),
            "tries": {"same": [], "slowed": [], "same, stored": [], "slowed, stored": []},
        }
        tries = study["tries"]
        for number in range(max(options.tries, options.stored)):
            for kind, before in (("same", ()), ("slowed", slowed)):
                if number < options.tries:
                    tries[kind].append(interleaved(overrides, before) | {"load": os.getloadavg()[0]})
                if number < options.stored:
                    tries[f"{kind}, stored"].append(stored(overrides, before, folder) | {"load": os.getloadavg()[0]})
            study["seconds"] = time.perf_counter() - started
            print(number + 1, {kind: tally(found) for kind, found in tries.items()}, file=sys.stderr, flush=True)
            if options.save:
                write_json(options.save, study)
        report(tries)


def tally(tries: list[dict[str, Any]]) -> str:
    return f"{sum(one['exit_code'] for one in tries)} of {len(tries)}"


def report(tries: dict[str, list[dict[str, Any]]]) -> None:
    """Print how many tries failed, and what the medians' ratios were."""
    print("| | failed | p50, new / old: least, median, most | mean width of its interval | load |\n|" + " --- |" * 5)
    for kind, found in tries.items():
        if found:
            ratios = sorted(one["ratios"]["p50"][0] for one in found)
            width = sum(one["ratios"]["p50"][2] - one["ratios"]["p50"][1] for one in found) / len(found)
            load = sum(one["load"] for one in found) / len(found)
            spread = f"{ratios[0]:.3f}, {ratios[len(ratios) // 2]:.3f}, {ratios[-1]:.3f}"
            print(f"| {kind} | {tally(found)} | {spread} | {width:.3f} | {load:.1f} |")


if __name__ == "__main__":
    main()
