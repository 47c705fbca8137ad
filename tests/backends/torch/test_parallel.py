"""Several processes compute one model: the same tokens as one, told and recorded by the first."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shared_out
import torch
from cases import TOLERANCE, Case, difference, expected

from xinfer import LLM, SamplingParams, cli
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.tiny import tiny_config, write_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback device")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
FOLDER = tiny_config("llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=32, vocab_size=301)
EITHER = pytest.mark.parametrize("backend", ["eager", pytest.param("compile", marks=pytest.mark.slow)])


def command(processes: int, *words: str) -> list[str]:
    return [*TORCHRUN, f"--nproc-per-node={processes}", sys.executable, "-m", "xinfer", *words]


def run(folder: Path, processes: int, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    started = command(processes, *words) if processes > 1 else [sys.executable, "-m", "xinfer", *words]
    return subprocess.run(
        started, cwd=folder, input=text, capture_output=True, text=True, check=False, timeout=240, env=ENVIRONMENT
    )


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "XINFER_LOG": "error"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parallel")
    write_folder(root / "model", FOLDER, 0)
    (root / "prompts.txt").write_text("abc\nhello hello\nx\n")
    return root


@EITHER
def test_two_processes_say_what_one_says_and_the_first_records_it(folder: Path, backend: str) -> None:
    words = ["--model", "model", "--prompts-file", "-", "--max-tokens", "24", "--seed", "3", f"backend={backend}"]
    words += ["sampling.n=2", "engine.max_num_batched_tokens=16", "sampling.logprobs=1"]
    one = run(folder, 1, *words, text=(folder / "prompts.txt").read_text())
    runs = set(folder.glob("outputs/*/*"))
    two = run(folder, 2, *words, "parallel.tensor=2", text=(folder / "prompts.txt").read_text())
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert one.stdout == two.stdout != ""
    (made,) = set(folder.glob("outputs/*/*")) - runs
    recorded = json.loads((made / "run.json").read_text())
    assert recorded["status"] == "completed"
    assert recorded["command"][:5] == ["torchrun", "--nproc-per-node", "2", "-m", "xinfer"]
    assert f"replay  torchrun --nproc-per-node 2 -m xinfer replay {made.relative_to(folder)}\n" in two.stderr
    again = run(folder, 2, "replay", str(made))
    assert again.returncode == 0, again.stderr
    assert "identical  6 texts" in again.stdout


# What two processes of backend=eager make of a llama, other tests say.
ALL = [
    pytest.param(backend, family, marks=pytest.mark.slow if (backend == "compile") != (family == "llama") else ())
    for backend in ("eager", "compile")
    for family in ("llama", "gpt_oss", "deepseek_v3", "qwen2_moe", "phi", "qwen2")
    if (backend, family) != ("compile", "qwen2_moe")  # whose layers are not all in memory
]


@pytest.mark.parametrize(("backend", "family"), ALL)
def test_logits_are_those_of_transformers_and_of_one_process(backend: str, family: str, tmp_path: Path) -> None:
    config = shape(family, next(iter(SHAPES[family])))
    if family == "qwen2":  # each process has whole blocks of inputs
        config |= {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    case, file = Case(tmp_path, config, write=write_reference, max_len=64), tmp_path / "out.pt"
    program = [sys.executable, shared_out.__file__, str(case.folder), family, backend, str(file)]
    started = [*TORCHRUN, "--nproc-per-node=2", *program]
    done = subprocess.run(started, capture_output=True, text=True, check=False, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    one, two = shared_out.steps(case.folder, family, "eager"), torch.load(file, weights_only=True)
    assert one["ids"] == two["ids"]
    assert difference(one["rows"], two["rows"]) <= TOLERANCE
    if family != "qwen2":  # which is rounded
        theirs = expected(case.reference(), two["ids"], 64)[: len(two["rows"])]
        assert difference(two["rows"], theirs) <= TOLERANCE
    assert two["bytes"] < one["bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.tensor=3"], r"parallel.tensor=3 does not divide layers\[0\].attention.heads=4: .* 1, 2 can be"),
        (["parallel.tensor=2", "model.quantization=int8"], r"cuts layers.0.attn.o.weight within blocks of inputs"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_once(folder: Path, words: list[str], message: str) -> None:
    done = run(folder, int(words[0][-1]), "--model", "model", "--prompt", "a", *words)
    said = [line for line in done.stderr.splitlines() if line.startswith("xinfer: ")]
    assert len(said) == 1 and re.search(message, said[0]), done.stderr
    assert (done.returncode, done.stdout) == (1, "")  # torchrun's own


@pytest.mark.parametrize(
    ("processes", "words", "message"),
    [
        (1, ["parallel.tensor=2"], "as many processes, but there is 1: start them with `torchrun --nproc-per-node 2"),
        (1, ["parallel.tensor=0"], "parallel.tensor=0 is out of range"),
        (2, [], "parallel.tensor=1 takes as many processes, but there are 2"),
        (2, ["parallel.tensor=2", "-m", "sampling.seed=1,2"], "a sweep can't be run by several processes"),
        (2, ["parallel.tensor=2", "backend=onnx"], "backend onnx computes in one process"),
        (2, ["parallel.tensor=2", "engine.determinism=invariant"], "sums over processes depend on how many rows"),
    ],
)
def test_what_does_not_go_with_several_processes_is_refused_before_they_meet(
    processes: int,
    words: list[str],
    message: str,
    folder: Path,
    say: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "0"), ("WORLD_SIZE", str(processes))):
        monkeypatch.setenv(name, value)
    code, out, error = say("--model", str(folder / "model"), "--prompt", "a", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert re.search(message, error)


GIVEN = """
import asyncio
from xinfer import LLM, AsyncEngine, SamplingParams
from xinfer.errors import XinferError
overrides = ["parallel.tensor=2"]
prompts = ["abc", "x"]
greedy = SamplingParams(temperature=0, max_tokens=12)
"""
PLAIN = """
with LLM("model", overrides=overrides) as llm:
    print([output.outputs[0].token_ids for output in llm.generate(prompts, greedy)])
try:
    LLM("model", overrides=overrides)
except XinferError as error:
    print(error)
"""
ASYNC = """
async def main():
    async with AsyncEngine("model", overrides=overrides) as engine:
        async def told(prompt):
            return [delta.output.token_ids async for delta in engine.generate(prompt, greedy) if delta.output][0]
        print(await asyncio.gather(*map(told, prompts)))
asyncio.run(main())
"""


@pytest.mark.parametrize(("program", "ends"), [(PLAIN, "has had a model already"), (ASYNC, "")])
def test_programs_go_on_in_the_first_process_alone(folder: Path, program: str, ends: str) -> None:
    python = [*TORCHRUN, "--nproc-per-node=2", sys.executable, "-c", GIVEN + program]
    done = subprocess.run(python, cwd=folder, capture_output=True, text=True, check=False, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    said, *more = done.stdout.splitlines()
    assert len(more) == bool(ends) and all(ends in line for line in more)
    with LLM(folder / "model") as llm:
        outputs = llm.generate(["abc", "x"], SamplingParams(temperature=0.0, max_tokens=12))
    assert said == str([output.outputs[0].token_ids for output in outputs])


@pytest.mark.parametrize(("ended", "said"), [(True, ""), (False, "xinfer: unknown flag --modle")])
def test_a_process_that_refuses_leaves_the_telling_to_the_first(
    ended: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        if ended:  # as torchrun does it once the first is gone
            raise KeyboardInterrupt

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("xinfer.cli.sleep", sleep)
    assert cli.run(["--modle", "x"]) == 2
    assert capsys.readouterr().err.startswith(said) and bool(said) != ended


@EITHER
@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_dies_ends_the_other_within_ten_seconds(folder: Path, dies: int, backend: str) -> None:
    prompts = "".join("x\n" for _ in range(3000))
    words = [
        "--model",
        "model",
        "--prompts-file",
        "-",
        "--max-tokens",
        "200",
        "sampling.ignore_eos=true",
        f"backend={backend}",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "none"}
    # As torchrun starts them, which would end the other one itself.
    started = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        python = [sys.executable, "-m", "xinfer", *words, "parallel.tensor=2", "record=none"]
        process = subprocess.Popen(python, cwd=folder, text=True, env=ENVIRONMENT | place | own, **pipes)
        assert process.stdin is not None
        process.stdin.write(prompts)
        process.stdin.close()
        started.append(process)
    stays, goes = started[1 - dies], started[dies]
    assert started[0].stdout is not None and started[0].stdout.read(1)  # both compute
    goes.kill()
    killed = time.monotonic()
    code = stays.wait(timeout=60)
    assert time.monotonic() - killed < 10
    assert code == 3
    assert stays.stderr is not None
    said = stays.stderr.read()
    assert f"xinfer: process {1 - dies} of parallel.tensor=2 ends, since another one has ended" in said
    assert "Traceback" not in said
    for each in started:
        each.wait()
        for pipe in (each.stdout, each.stderr):
            assert pipe is not None
            pipe.close()
