"""experiments/bench_gate.py: what it plants is found by a path alone, and it reads what `bench` prints."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from xinfer.records.bench_gate import judge
from xinfer.records.bench_samples import Measured, Repeat, RequestSample, Side
from xinfer.tasks.bench_page import comparison_lines

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def experiment():
    spec = spec_from_file_location("bench_gate_experiment", ROOT / "experiments" / "bench_gate.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def side(gap: float) -> Side:
    request = RequestSample(1, 5, 1.0, (gap,) * 4, 5.0)
    facts = {"backend.name": "fake", "model.dtype": "float32"}
    return Side(facts, {"version": "1"}, {}, [Measured("tg4", 1, [Repeat((request,), 5.0)] * 6)])


def test_it_reads_ratios_and_verdicts_out_of_what_is_printed(experiment):
    new, old = side(12.0), side(10.0)
    lines = comparison_lines(new, old, judge(new, old, paired=True, max_regression=0.05))
    found = experiment.outcome(1, "\n".join(lines))
    assert found["exit_code"] == 1 and not found["grown"]
    assert found["ratios"] == {
        "mean": [1.2, 1.2, 1.2, ""],
        "p50": [1.2, 1.2, 1.2, "regression"],
        "p95": [1.2, 1.2, 1.2, "regression"],
    }


def test_what_it_plants_is_a_plugin_that_takes_at_least_a_tenth_more_of_the_processors_time(experiment, tmp_path: Path):
    code = """
from importlib.metadata import entry_points
from time import thread_time
(found,) = [entry for entry in entry_points(group="xinfer") if entry.name == "slowed"]
module = found.load()
began = module.last = thread_time()
while thread_time() < began + 0.2:
    pass
worked = thread_time()
module.xinfer_on_step(step=None)
print((thread_time() - worked) / (worked - began))
"""
    folder = experiment.plant(tmp_path / "slowed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= experiment.SHARE
