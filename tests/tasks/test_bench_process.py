"""Two versions take turns as processes: real ones with a tiny model, and others that do not behave."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from xinfer.errors import XinferError
from xinfer.records.bench_samples import read_sides
from xinfer.tasks.bench_process import BenchProcess
from xinfer.tasks.bench_work import Work

ROOT = Path(__file__).parents[2]


def test_a_checkout_is_held_to_another_in_turns(tiny_llama: Path, tmp_path: Path):
    """The same one here, so only a limit that nothing reaches is sure to pass."""
    words = ["--model", str(tiny_llama), "bench.tests=[tg4,pp8]", "bench.max_regression=99", "bench.batch=2"]
    (tmp_path / "xinfer").mkdir()  # where we stand does not count
    command = [sys.executable, "-P", "-m", "xinfer", "bench", *words, f"bench.against_checkout={ROOT}"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "tg4 batch 2: ITL p95 " in done.stdout and "pp8 batch 2: TTFT p50 " in done.stdout
    (file,) = tmp_path.glob("outputs/*/*/bench.json")  # those of the two processes have no folder
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1
    for side in read_sides(file):
        assert [len(measured.repeats) for measured in side.measured] == [5, 5]
        assert all(len(request.itl_ms) == 4 for request in side.measured[0].repeats[0].requests)
        assert all(repeat.peak_memory_bytes > 1 << 20 for repeat in side.measured[0].repeats)


def program(folder: Path, code: str) -> str:
    path = folder / "python"
    path.write_text(f"#!{sys.executable} -S\nimport sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


HELLO = 'print(\'{"protocol": 1, "side": {"facts": {}, "build": {}, "resources": {}}}\', flush=True)\n'


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit(3)", "the other ended with exit code 3"),
        ("print('hello')", "said 'hello"),
        ("print('{\"protocol\": 2}')", "another version of this protocol"),
        ('print(\'{"protocol": 1, "side": {}}\')', "does not say what it is"),
        (f"{HELLO}input()\nprint('{{}}')", "does not measure any more"),
        (f"{HELLO}input()\nsys.exit(5)", "ended with exit code 5"),
    ],
    ids=["dies", "text", "newer", "nobody", "nothing", "stops"],
)
def test_a_process_that_does_not_behave_is_one_clear_error(code: str, message: str, tmp_path: Path):
    process = BenchProcess("the other", program(tmp_path, code), None, [])
    try:
        with pytest.raises(XinferError, match=message):
            [process.load(), process(Work.parse("tg4", 1))]
    finally:
        process.close()
    assert process._process.returncode is not None


def test_an_interpreter_that_is_not_there_is_said():
    with pytest.raises(XinferError, match="can't be started"):
        BenchProcess("the other", "/nowhere/python", None, [])
