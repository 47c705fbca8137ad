"""Where does a decode step on ONNX Runtime go? Its operators, one by one, and what the runtime adds around them.

    python experiments/onnx_profile.py [OVERRIDES ...] [--context 128] [--steps 200]

Overrides are those of `python -m xinfer`, without `backend=onnx`. The step's median is of a session that is not
profiled, alternating with one that is: watching makes short operators several times as long, so a kind's time is quoted
as its share of all that was watched, of the step that was not. Of matrix products it tells how fast their
weights are read (codes, without scales), against what memory was once measured to give.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import onnxruntime
import torch

from xinfer import Limits, hardware
from xinfer.backends import BackendContext
from xinfer.composing import compose
from xinfer.engine.runner import ModelRunner
from xinfer.models.cache import cache_folder
from xinfer.plugins import load_plugins
from xinfer.session import Session
from xinfer.testing.stepper import Stepper

PRODUCTS = ("MatMulNBits", "FusedMatMul")


def runner_of(overrides: list[str], longest: int, folder: str | None = None) -> ModelRunner:
    """Return a runner, whose session writes a profile if there is a folder for it."""
    plugins = load_plugins()
    session = Session(compose(["backend=onnx", *overrides], plugins), plugins)
    limits = Limits(max_model_len=longest, max_num_seqs=1, kv_memory=256e6)
    context = BackendContext(session.model, session.context.config, limits)
    make = onnxruntime.SessionOptions

    def watched() -> onnxruntime.SessionOptions:
        options = make()
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/profile"
        return options

    if folder is None:
        return session.backend.create(context)
    with patch.object(onnxruntime, "SessionOptions", watched):
        return session.backend.create(context)


def decode(stepper: Stepper, context: int, steps: int) -> list[float]:
    """Return the seconds of decode steps at this context."""
    sequence = stepper.start([5] * context)
    stepper.step([sequence], [context])
    seconds = []
    for _ in range(steps):
        sequence.token_ids.append(5)
        started = time.perf_counter()
        stepper.step([sequence], [1])
        seconds.append(time.perf_counter() - started)
    stepper.finish(sequence)
    return seconds


def bits_of(path: str) -> dict[str, int]:
    """Return of each node of a graph how many bits its weights have."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return {node.name: next((each.i for each in node.attribute if each.name == "bits"), 32) for node in nodes}


def kernels(events: list[dict[str, Any]], steps: int, bits: dict[str, int]) -> dict[str, tuple[float, float, float]]:
    """Return by kind, over the last steps: microseconds a step, calls a step, bytes of codes or numbers a step."""
    begin = [event["ts"] for event in events if event["name"] == "model_run"][-steps]
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= begin:
            operator, weights = event["args"]["op_name"], 0
            if operator in PRODUCTS:
                rows = next(iter(event["args"]["output_type_shape"][0].values()))[-1]
                columns = next(iter(event["args"]["input_type_shape"][0].values()))[-1]
                own = bits[event["name"].removesuffix("_kernel_time")]
                operator, weights = f"{operator} {columns} to {rows}, {own} bits", rows * columns * own // 8
            for place, value in enumerate((event["dur"], 1, weights)):
                found[operator][place] += value / steps
    return {name: (time_, calls, weights) for name, (time_, calls, weights) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    longest = options.context + options.steps
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = runner_of(options.overrides, longest), runner_of(options.overrides, longest, folder)
        steppers = Stepper(plain), Stepper(watched)
        rounds = [
            [statistics.median(decode(each, options.context, options.steps)) for each in steppers] for _ in range(5)
        ]
        events = json.loads(Path(watched._session.end_profiling()).read_text())
    step, slow = (statistics.median(each) for each in zip(*rounds, strict=True))
    found = kernels(events, options.steps, bits_of(watched._session._model_path))
    inside = sum(each[0] for each in found.values())
    speed = hardware.speed(torch.device("cpu"), cache=cache_folder())
    machine = hardware.describe()
    print(
        f"{machine.cpu}, {machine.threads} threads, onnxruntime {onnxruntime.__version__}, "
        f"{' '.join(options.overrides) or 'float32'}, context {options.context}, {date.today()}\n"
    )
    read, most = plain.info.step_read_bytes, speed.read_bytes_s
    print(f"A step takes {step * 1e3:.2f} ms, watched {slow * 1e3:.2f} ms, of which operators {inside / 1e3:.2f} ms.")
    print(f"Its {read / 1e6:.0f} MB of weights are read at {read / step / 1e9:.1f} of {most / 1e9:.0f} GB/s.\n")
    print("| operator | calls | share of the step | ms | weights, GB/s |\n| --- | --- | --- | --- | --- |")
    for name, (microseconds, calls, weights) in sorted(found.items(), key=lambda item: -item[1][0]):
        share = microseconds / inside
        rate = f"{weights / (share * step) / 1e9:.1f}" if weights else ""
        print(f"| {name} | {calls:.0f} | {share:.1%} | {share * step * 1e3:.2f} | {rate} |")
    for runner in (plain, watched):
        runner.close()


if __name__ == "__main__":
    main()
