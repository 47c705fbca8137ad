"""Figures of experiments/speed.py: kept round by round, put together and drawn, each command a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
ONNX, EAGER, LLAMA = "backend=onnx model.quantization=int4", "backend=eager", "llama:Q4_0"
PEER = """
import json, pathlib, sys
calls = pathlib.Path(sys.argv[1])
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
count = len(calls.read_text())
if count > int(sys.argv[2]):
    sys.exit("it broke")
print(json.dumps({"prefill_tok_s": 100.0 * count, "decode_tok_s": 10.0 * count, "batch_tok_s": 30.0}))
"""


def command(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, str(EXPERIMENTS / name), *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, env=os.environ | environment, timeout=240)


def rates(decode: float, **more: object) -> dict[str, object]:
    return {"prefill_tok_s": 10 * decode, "decode_tok_s": decode, "batch_tok_s": 2 * decode} | more


def onnx(decode: float) -> dict[str, object]:
    told = {"backend": "onnx", "model": "Tiny", "precision": "int4", "dtype": "float32", "step_read_bytes": 100_000_000}
    return rates(decode, **told)


def eager(decode: float) -> dict[str, object]:
    return onnx(decode) | {"backend": "eager", "precision": "fp32", "step_read_bytes": 500_000_000}


def sitting(rounds: list[dict[str, Any]], day: int = 1, **more: object) -> dict[str, Any]:
    return {
        "command": f"python experiments/speed.py '{ONNX}'",
        "started": f"2026-12-0{day}T10:00:00",
        "machine": {"cpu": "A CPU", "threads": 2},
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "read_bytes_s": 5e10,
        "peers": {LLAMA: "int4"},
        "work": {"prefill": [1, 512, 1], "decode": [1, 32, 129], "batch": [32, 64, 64]},
        "times": 3,
        "rounds": rounds,
        **more,
    }


def write(path: Path, *sittings: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"study": "experiments/speed.py", "format": 1, "sittings": sittings}))
    return path


FIRST = [
    {ONNX: onnx(200), LLAMA: rates(100, batch_tok_s=100)},
    {ONNX: onnx(220), LLAMA: rates(200, batch_tok_s=100)},
    {ONNX: onnx(210), LLAMA: rates(300, batch_tok_s=100)},
]


def test_two_sittings_make_one_picture_and_a_table(tmp_path: Path):
    first = write(tmp_path / "first.json", sitting(FIRST))
    second = [{ONNX: onnx(240), EAGER: eager(30)}, {ONNX: onnx(180), EAGER: eager(40)}]
    other = write(tmp_path / "second.json", sitting(second, 2, read_bytes_s=6e10))
    png, svg = tmp_path / "picture.png", tmp_path / "picture.svg"
    done = command("speed_picture.py", first, other, first, "--out", png, svg)  # one file twice counts once
    assert done.returncode == 0, done.stderr
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and b"<svg" in svg.read_bytes()[:1000]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Tiny: ")
    assert lines[1] == "A CPU, 2 threads; memory is read at 60.0 GB/s; 2026-12-01 to 2026-12-02, 5 rounds in 2 sittings"
    # 180 200 210 220 240 of 6e10 / 1e8 bytes; 100 200 300 held to the same; 30 and 40 of 6e10 / 5e8
    assert "| int4 | xinfer onnx | 2100 | 210.0 | 600.0 | 35% | 420 | 5 |" in lines
    assert "| int4 | llama.cpp Q4_0 | 2000 | 200.0 | 600.0 | 33% | 100 | 3 |" in lines
    assert "| fp32 | xinfer eager | 350 | 35.0 | 120.0 | 29% | 70 | 2 |" in lines
    # The middle one of 200 / 100, 220 / 200 and 210 / 300, which is not 210 / 200; of batch, of 400, 440 and 420 / 100.
    assert "| int4: xinfer onnx / llama.cpp Q4_0 | 1.10 | 1.10 | 4.20 |" in lines
    assert sum(" / " in line for line in lines) == 1


def test_engines_that_never_took_turns_have_no_ratio(tmp_path: Path):
    file = write(tmp_path / "both.json", sitting([{ONNX: onnx(200)}]), sitting([{LLAMA: rates(100)}], 2))
    done = command("speed_picture.py", file)
    assert done.returncode == 0, done.stderr
    assert "| int4: xinfer onnx / llama.cpp Q4_0 |  |  |  |" in done.stdout.splitlines()


GOOD = json.dumps({"study": "experiments/speed.py", "format": 1, "sittings": [sitting(FIRST)]})


@pytest.mark.parametrize(
    "text",
    [
        GOOD[:-100],
        "[1, 2]",
        '{"date": "2026-12-01", "output_throughput": 12.5}',
        GOOD.replace('"format": 1', '"format": 2'),
        GOOD.replace('"decode_tok_s": 220', '"decode_tok_s": NaN'),
        GOOD.replace('"decode_tok_s": 220', '"decode_tok_s": "fast"'),
        GOOD.replace('"step_read_bytes"', '"bytes"'),
        GOOD.replace('"machine"', '"place"'),
        GOOD.replace('"rounds": [', '"rounds": [7, '),
        None,
    ],
    ids=["cut", "list", "foreign", "newer", "nan", "word", "field", "key", "round", "absent"],
)
def test_a_file_that_is_damaged_or_something_else_is_refused_in_one_line(text: str | None, tmp_path: Path):
    file, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    if text is not None:
        file.write_text(text)
    done = command("speed_picture.py", file, "--out", picture)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert str(file) in line
    assert not picture.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": {"cpu": "Another", "threads": 2}}, "different machines"),
        ({"rounds": [{ONNX: onnx(1) | {"model": "Large"}, EAGER: eager(1)}]}, "different models"),
        ({"times": 1}, "different work"),
        ({"rounds": []}, None),
    ],
)
def test_what_one_picture_cannot_compare_is_refused(change: dict[str, Any], said: str | None, tmp_path: Path):
    first = write(tmp_path / "first.json", sitting(FIRST))
    done = command("speed_picture.py", first, write(tmp_path / "other.json", sitting(FIRST, 2) | change))
    assert done.returncode == (2 if said else 0)
    assert said is None or (said in done.stderr and len(done.stderr.splitlines()) == 1)


def test_finished_rounds_are_kept_when_a_sitting_breaks_off_and_the_next_is_added(tmp_path: Path):
    file, calls, script = tmp_path / "figures.json", tmp_path / "calls", tmp_path / "peer.py"
    script.write_text(PEER)

    def measured(breaks_after: int) -> subprocess.CompletedProcess[str]:
        peer = f"{sys.executable} {script} {calls} {breaks_after}"
        arguments = ("--peer", "own:fp32", peer, "--rounds", 3, "--save", file)
        return command("speed.py", *arguments, XINFER_CACHE=str(tmp_path / "cache"))

    broken = measured(2)
    assert broken.returncode == 1 and "it broke" in broken.stderr
    (kept,) = json.loads(file.read_text())["sittings"]
    assert [found["own:fp32"]["decode_tok_s"] for found in kept["rounds"]] == [10, 20]
    assert kept["peers"] == {"own:fp32": "fp32"} and kept["read_bytes_s"] > 0 and "torch" in kept["versions"]
    assert "PATH/peer.py" in kept["command"] and str(tmp_path) not in file.read_text()

    calls.unlink()
    whole = measured(3)
    assert whole.returncode == 0, whole.stderr
    assert "| own:fp32 | 200 | 20.0 |" in whole.stdout
    assert [len(each["rounds"]) for each in json.loads(file.read_text())["sittings"]] == [2, 3]
    assert "| fp32 | own fp32 | 200 | 20.0 |  |  | 30 | 5 |" in command("speed_picture.py", file).stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "calls", "figures.json", "peer.py"]


@pytest.mark.parametrize(("name", "text"), [("own", None), ("own:best", None), ("own:fp32", "{}")])
def test_what_could_not_be_saved_is_refused_before_anything_is_measured(name: str, text: str | None, tmp_path: Path):
    file, calls, script = tmp_path / "figures.json", tmp_path / "calls", tmp_path / "peer.py"
    script.write_text(PEER)
    if text is not None:
        file.write_text(text)
    done = command("speed.py", "--peer", name, f"{sys.executable} {script} {calls} 9", "--save", file)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert not calls.exists() and (not file.exists() if text is None else file.read_text() == text)


def test_a_configuration_says_what_it_computed_with():
    little = {"prefill": (1, 8, 1), "decode": (1, 4, 9), "batch": (2, 4, 2)}
    code = f"import json, speed; speed.WORK = {little}; print(json.dumps(speed.measure(['model.dtype=bfloat16'])))"
    whole = [sys.executable, "-c", code]
    paths = os.pathsep.join([str(EXPERIMENTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(whole, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["backend"], found["precision"], found["model"]) == ("eager", "bf16", "SmolLM2-135M-Instruct")
    assert 2 * 134_515_008 <= found["step_read_bytes"] < 2.05 * 134_515_008  # its weights, in two bytes each
