"""The command as people use it: real processes where a process is the point, its own function for many small cases."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xinfer.records.reader import read_run


def test_the_text_goes_to_standard_output_and_everything_else_to_standard_error(
    xinfer, tiny_llama: Path, tmp_path: Path
):
    done = xinfer(
        "--model", str(tiny_llama), "--prompt", "hello", "--max-tokens", "12", "--json-stats", "sampling.seed=5"
    )
    assert done.returncode == 0, done.stderr
    recorded = read_run(next((tmp_path / "outputs").glob("*/*")))
    assert done.stdout == recorded.outputs[0]["text"] + "\n"
    figures = next(json.loads(line) for line in done.stderr.splitlines() if line.startswith("{"))
    assert figures["generated_tokens"] == len(recorded.outputs[0]["token_ids"]) <= 12
    assert figures["seed"] == 5
    assert isinstance(figures["kv_cache_bytes"], int) and isinstance(figures["resident_weight_bytes"], int)
    assert figures["tpot_ms"] == pytest.approx(figures["decode_ms"] / (figures["generated_tokens"] - 1))
    assert "replay  python -m xinfer" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_same_seed_in_two_processes_gives_the_same_tokens_and_another_does_not(
    xinfer, smollm2_path: Path, tmp_path: Path
):
    for seed in (7, 7, 8):
        assert xinfer(f"sampling.seed={seed}", "--max-tokens", "16").returncode == 0
    runs = sorted((tmp_path / "outputs").glob("*/*"), key=lambda folder: folder.stat().st_mtime_ns)
    first, second, other = (read_run(folder).outputs[0]["token_ids"] for folder in runs)
    assert first == second != other


def test_a_sensible_sentence_and_nothing_else(xinfer, smollm2_path: Path):
    done = xinfer("--prompt", "Explain gravity in one sentence.", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout.startswith("Gravity is")
    assert done.stdout.count("\n") == 1
    assert done.stdout.rstrip().endswith(".")


def test_a_sweep_makes_a_run_for_each_value_under_one_folder(xinfer, tiny_llama: Path, tmp_path: Path):
    text = "a, b = ${c} 'd' #\n你好"
    done = xinfer("-m", "sampling.seed=1,2,3", "--model", str(tiny_llama), "--max-tokens", "4", "--prompt", text)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs").glob("sweeps/*/*")
    runs = [read_run(sweep / str(i)) for i in range(3)]
    assert [r.info["seed"] for r in runs] == [1, 2, 3]
    assert all(r.requests[0]["prompt"] == text and r.status == "completed" for r in runs)
    assert not any(text in path.read_text("utf-8", "replace") for path in sweep.rglob("*.yaml"))


def test_every_failed_job_of_a_sweep_is_named_and_the_others_run(xinfer, tiny_llama: Path, tmp_path: Path):
    done = xinfer("-m", "backend.device=abc,cpu,xyz", "--model", str(tiny_llama), "--max-tokens", "2", "--prompt", "x")
    assert done.returncode == 2
    assert "job 0" in done.stderr and "job 2" in done.stderr and "job 1" not in done.stderr
    assert [read_run(f.parent).status for f in (tmp_path / "outputs").rglob("run.json")] == ["completed"]


def test_runs_that_start_together_have_folders_of_their_own(tiny_llama: Path, tmp_path: Path):
    command = [sys.executable, "-m", "xinfer", "--model", str(tiny_llama), "--max-tokens", "2", "--prompt", "x"]
    started = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(3)
    ]
    assert [process.wait(timeout=240) for process in started] == [0, 0, 0]
    assert len({f.parent for f in (tmp_path / "outputs").rglob("run.json")}) == 3


def test_the_printed_command_replays_the_run(xinfer, tiny_llama: Path, tmp_path: Path):
    done = xinfer(
        "--model", str(tiny_llama), "--prompt", "it's, ${a}", "--prompt", "b", "--stop", "q", "--max-tokens", "9"
    )
    command = next(line for line in done.stderr.splitlines() if line.startswith("replay")).removeprefix(
        "replay  python"
    )
    again = subprocess.run(
        f"{sys.executable}{command}", shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert again.returncode == 0, again.stderr
    assert "identical  2 texts" in again.stdout
    for folder in (tmp_path / "outputs").glob("*/*"):
        run = read_run(folder)
        text = "".join(f"{run.outputs[index]['text']}\n" for index in (0, 1))
        assert text.replace("\r\n", "\n").replace("\r", "\n") == done.stdout  # as Python reads a process's text


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_leaves_a_readable_record(tiny_llama: Path, tmp_path: Path, ending: signal.Signals):
    prompts = ["--prompt", "a", "--prompt", "b"]
    command = [sys.executable, "-m", "xinfer", "--model", str(tiny_llama), *prompts]
    # The first request ends after a token; the second goes on until its context is full.
    requests = tmp_path / "two.jsonl"
    requests.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    options = [
        "--max-tokens",
        "null",
        "sampling.ignore_eos=true",
        "engine.max_num_seqs=1",
        "engine.max_num_batched_tokens=8",
    ]
    process = subprocess.Popen(
        [*command, *options], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        done = list((tmp_path / "outputs").rglob("requests.jsonl"))
        if done and '"event": "output"' in done[0].read_text():
            break
        time.sleep(0.002)
    process.send_signal(ending)
    process.wait(timeout=60)
    (folder,) = (f.parent for f in (tmp_path / "outputs").rglob("run.json"))
    recorded = read_run(folder)
    assert recorded.outputs[0]["finish_reason"] == "length"
    assert set(recorded.requests) == {0, 1}
    if ending == signal.SIGINT and process.returncode == 130:
        assert recorded.status == "interrupted"
        assert recorded.outputs[1]["finish_reason"] in ("abort", "length")
        assert (folder / "stats.json").exists()
    elif process.returncode == -signal.SIGKILL:
        assert recorded.status == "running"


def test_an_interrupted_pipe_ends_quietly(tiny_llama: Path, tmp_path: Path):
    command = f"{sys.executable} -m xinfer --model {tiny_llama} --prompt x --max-tokens 200 sampling.ignore_eos=true"
    done = subprocess.run(
        f"{command} | head -c 5 >/dev/null", shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


BAD = [
    (["sampling.sed=1"], r"unknown key 'sampling.sed' (did you mean 'sampling.seed'"),
    (["backend.devise=cpu"], "unknown key 'backend.devise' (did you mean 'backend.device'"),
    (
        ["genrate"],
        "task=genrate is unknown (did you mean 'generate'?) (there are: audit, bench, device, diff, explain, ",
    ),
    (
        ["--json", "--prompt", "x"],
        "json=true is of the tasks inspect, runs, why: for the figures of a run give --json-stats",
    ),
    (["backend=eagre"], "backend=eagre is unknown (did you mean 'eager'"),
    (["model=smollm"], "model=smollm is unknown (did you mean 'smollm2'"),
    (["sampling.top_k=abc"], "sampling.top_k=abc: Value 'abc' of type 'str' could not be converted to Integer"),
    (["sampling.seed=1.5"], "sampling.seed=1.5"),
    (["sampling.seed=nan"], "sampling.seed=nan"),
    (["sampling.seed=true"], "sampling.seed=true"),
    (["--seed", "-1"], "sampling.seed=-1 is out of range: a whole number from 0 to 18446744073709551615"),
    (["--temperature", "-0.5"], "sampling.temperature=-0.5 is out of range"),
    (["--top-p", "1.5"], "sampling.top_p=1.5 is out of range: a finite number from 0 to 1"),
    (["sampling.top_k=-2"], "sampling.top_k=-2 is out of range"),
    (["--max-tokens", "-1"], "sampling.max_tokens=-1 is out of range"),
    (["engine.policy=lottery"], "engine.policy='lottery' is unknown (there are: fcfs, priority)"),
    (["engine.determinism=perfect"], "engine.determinism='perfect' is unknown (there are: fast, invariant)"),
    (["engine.logprobs_mode=cooked"], "engine.logprobs_mode='cooked' is unknown (there are: raw_logprobs"),
    (["engine.timeout_s=-1"], "engine.timeout_s=-1.0 is out of range"),
    (["engine.speculation=draft"], "engine.draft_model=REFERENCE go together"),
    (["sampling.seed=1,2"], "add -m"),
    (["engine.max_num_seqs=0"], "engine.max_num_seqs=0 is out of range"),
    (["record.text=some"], "record.text='some' is unknown"),
    (["log.level=loud"], "log level 'loud' is unknown"),
    (["model.load_format=magic"], "model.load_format='magic' is unknown"),
    (["--model", "/no/such/folder"], "/no/such/folder"),
    (["--prompt", "x", "--bogus"], "unknown flag --bogus"),
    (["model.reference=a=b"], "in quotes twice"),
    (["model=custom"], "model.reference must be given"),
    (["hello", "world"], "unexpected word 'world'"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_usage_is_one_clear_line_and_exit_code_2(say, monkeypatch, words: list[str], message: str):
    monkeypatch.delenv("XINFER_LOG")
    code, out, err = say(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1, err
    assert not list(Path("outputs").rglob("*.json*"))


def test_what_is_wrong_with_a_model_or_request_is_said_before_weights_are_read(say, tiny_llama: Path, tmp_path: Path):
    model = ["--model", str(tiny_llama)]
    long, config = "x" * 600, json.loads((tiny_llama / "config.json").read_text())
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    (tmp_path / "empty").mkdir()
    for words, message in [
        ([*model, "--prompt", long], "the prompt has 6"),
        ([*model, "--max-tokens", "9999", "--prompt", "x"], "max_tokens=9999"),
        ([*model, "backend.device=cuda:7"], "backend.device='cuda:7' is not there (there are: cpu"),
        ([*model, "model.dtype=float8"], "model.dtype='float8' is unknown"),
        (
            ["--model", str(strange)],
            "model_type='lama' is not supported (did you mean 'llama'?) (supported: ",
        ),
        (["--model", str(tmp_path / "empty")], "no config.json"),
    ]:
        code, out, err = say(*words)
        assert (code, out) == (2, ""), (words, err)
        assert message in err
        assert len(err.strip().splitlines()) == 1, err
        assert not list((tmp_path / "outputs").rglob("*.json*")), words


def test_no_text_of_a_prompt_is_in_any_log(say, monkeypatch, tiny_llama: Path, tmp_path: Path):
    monkeypatch.setenv("XINFER_LOG", "debug")
    code, _, err = say(
        "--model", str(tiny_llama), "--prompt", "swordfish", "--system", "opensesame", "--max-tokens", "3"
    )
    assert code == 0
    (folder,) = (f.parent for f in tmp_path.rglob("run.json"))
    for text in (
        err,
        *((folder / name).read_text() for name in ("xinfer.log", "run.json", "stats.json", ".hydra/config.yaml")),
    ):
        assert "swordfish" not in text and "opensesame" not in text
    events = (folder / "xinfer.log").read_text()
    for event in (
        "weights on the device",
        "model loaded",
        "kv cache",
        "request queued",
        "prefill_ms",
        "streaming=False",
    ):
        assert event in events


def test_log_lines_can_be_json(say, monkeypatch, tiny_llama: Path):
    monkeypatch.setenv("XINFER_LOG", "info")
    _, _, err = say("--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "2", "log.json=true")
    events = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    loaded = next(event for event in events if event["event"] == "model loaded")
    assert isinstance(loaded["seconds"], float)


def test_several_prompts_come_out_in_their_order(say, tiny_llama: Path, tmp_path: Path):
    words = [word for i in range(5) for word in ("--prompt", f"p{i}")]
    code, out, _ = say("--model", str(tiny_llama), *words, "--max-tokens", "6", "--seed", "1")
    (folder,) = (f.parent for f in tmp_path.rglob("run.json"))
    outputs = read_run(folder).outputs
    assert code == 0
    assert out == "".join(outputs[i]["text"] + "\n" for i in range(5))


def test_bench_only_prints_no_text(say, tiny_llama: Path):
    code, out, err = say("--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "4", "--bench-only")
    assert (code, out) == (0, "")
    assert "decode" in err


def test_without_a_record_there_is_no_folder(say, tiny_llama: Path, tmp_path: Path):
    code, _, err = say("--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "2", "record=none")
    assert code == 0
    assert not list(tmp_path.rglob("run.json"))
    assert "replay" not in err


def test_help_shows_groups_flags_and_keys(xinfer):
    done = xinfer("--help")
    assert done.returncode == 0
    for word in (
        "--prompt",
        "key='a=b'",
        "backend: compile, eager, onnx",
        "sampling: default, full, greedy",
        "max_num_seqs",
        "task:",
    ):
        assert word in done.stdout, done.stdout
    assert "schema" not in done.stdout


def test_device_and_plugins_tell_and_leave_no_files(xinfer, tiny_llama: Path, tmp_path: Path):
    device, plugins = xinfer("device", "backend=eager", "--model", str(tiny_llama)), xinfer("plugins")
    assert device.returncode == plugins.returncode == 0, device.stderr + plugins.stderr
    for word in ("cpu", "GB/s", "torch", "attention is computed by"):
        assert word in device.stdout
    assert "xinfer.backends.torch" in plugins.stdout
    assert list(tmp_path.iterdir()) == []


PLUGIN = """
from dataclasses import dataclass
from xinfer import Backend, hookimpl
from xinfer.testing.fake import FakeRunner, FakeTokenizer

@dataclass
class Keys:
    api_key: str | None = None
    fails: bool = False

class Failing(FakeRunner):
    def forward(self, batch):
        raise RuntimeError("the wire was cut")

@hookimpl
def xinfer_backends():
    make = lambda context: Failing() if context.config.fails else FakeRunner()
    return [Backend("remote", Keys, make, tokenizer=lambda context: FakeTokenizer())]
"""


@pytest.fixture
def remote(xinfer, tmp_path: Path):
    """Run the command with a backend installed that has a secret, and can fail."""
    site = tmp_path / "site"
    (site / "remote-1.dist-info").mkdir(parents=True)
    (site / "remote-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: remote\nVersion: 1\n")
    (site / "remote-1.dist-info" / "entry_points.txt").write_text("[xinfer]\nremote = remote\n")
    (site / "remote.py").write_text(PLUGIN)
    return lambda *words: xinfer(*words, "--prompt", "a", "--max-tokens", "3", PYTHONPATH=str(site))


def test_secrets_of_a_plugin_are_shown_nowhere(remote, tmp_path: Path):
    done = remote("-m", "backend=remote", "backend.api_key=hunter2,hunter3")
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    everything = done.stdout + done.stderr + "".join(path.read_text("utf-8") for path in files)
    assert "api_key=<redacted>" in everything
    assert "hunter" not in everything


def test_a_backend_that_fails_is_one_line_and_its_traceback_is_in_the_record(remote, tmp_path: Path):
    done = remote("backend=remote", "backend.fails=true")
    assert done.returncode == 3
    assert "RuntimeError: the wire was cut" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    (folder,) = (f.parent for f in (tmp_path / "outputs").rglob("run.json"))
    assert read_run(folder).status == "failed"
    assert read_run(folder).requests[0]["prompt"] == "a"
    assert "Traceback" in (folder / "xinfer.log").read_text()
