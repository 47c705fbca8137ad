"""Sweeps as people run them: jobs that fail or are killed, sweeps that are run again, several processes at once."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from xinfer.cli import run
from xinfer.flags import CommandLine
from xinfer.inputs import Prompt
from xinfer.records.reader import read_run
from xinfer.records.sweep import SweepJob, read_job, write_job
from xinfer.tasks.sweep import work_hash

# A backend whose process is killed, or that fails, as long as there is a file that says so.
PLUGIN = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from xinfer import Backend, hookimpl
from xinfer.testing.fake import FakeRunner, FakeTokenizer

@dataclass
class Keys:
    api_key: str | None = None
    killed: bool = False

class Runner(FakeRunner):
    def forward(self, batch):
        os.kill(os.getpid(), signal.SIGKILL)

@hookimpl
def xinfer_backends():
    make = lambda context: Runner() if context.config.killed and Path("trouble").exists() else FakeRunner()
    return [Backend("mortal", Keys, make, tokenizer=lambda context: FakeTokenizer())]
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run a sweep of `backend=mortal` from this process, in an empty folder; returns (exit code, standard error)."""
    site = tmp_path / "site"
    (site / "mortal-1.dist-info").mkdir(parents=True)
    (site / "mortal-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mortal\nVersion: 1\n")
    (site / "mortal-1.dist-info" / "entry_points.txt").write_text("[xinfer]\nmortal = mortal\n")
    (site / "mortal.py").write_text(PLUGIN)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(sys, "argv", ["xinfer"])

    def call(*words: str, prompt: str = "a") -> tuple[int, str]:
        GlobalHydra.instance().clear()
        code = run(["-m", "backend=mortal", *words, "--prompt", prompt, "--max-tokens", "4"])
        return code, capfd.readouterr().err

    return call


def jobs(folder: Path) -> list[dict]:
    return json.loads((folder / "sweep.json").read_text("utf-8"))["jobs"]


def test_a_sweep_of_which_a_job_died_is_finished_by_the_same_command(sweep):
    Path("trouble").touch()
    words = ["backend.killed=false,true", "backend.api_key=hunter2", "--resume", "swept"]
    code, said = sweep(*words)
    folder = Path("swept")
    assert code == 3
    assert "killed by signal 9" in said and "report  swept/report.html" in said and "--resume swept" in said
    assert [job["status"] for job in jobs(folder)] == ["completed", "failed"]
    assert jobs(folder)[1]["error"].startswith("killed by signal 9")
    assert "killed by signal 9" in (folder / "report.html").read_text("utf-8")
    assert read_run(folder / "1").status == "running"

    Path("trouble").unlink()
    before = (folder / "0" / "run.json").stat().st_mtime_ns
    code, said = sweep(*words)
    assert code == 0
    assert "0: done already" in said and "1: done already" not in said
    assert [job["status"] for job in jobs(folder)] == ["completed", "completed"]
    assert (folder / "0" / "run.json").stat().st_mtime_ns == before
    (replaced,) = (folder / "earlier").iterdir()
    assert read_run(replaced).status == "running"
    everything = said + "".join(p.read_text("utf-8", "replace") for p in folder.rglob("*") if p.is_file())
    assert "hunter2" not in everything


def test_a_job_that_another_process_is_at_is_left_to_it(sweep):
    Path("swept").mkdir()
    with FileLock("swept/.0.lock"):
        code, said = sweep("--resume", "swept", "sampling.seed=1")
    assert code == 0
    assert "is being written by another process" in said
    assert read_job(Path("swept/0")) is None


def test_a_job_whose_process_outlives_its_sweep_is_left_to_it(sweep, write_run):
    folder = write_run(Path("swept/0"), status="running")
    mine = (os.getpid(), psutil.Process().create_time())
    write_job(folder, SweepJob(0, "killed", (), process=mine))
    code, said = sweep("--resume", "swept", "sampling.seed=1")
    assert "is being written by another process" in said
    assert read_job(folder) == SweepJob(0, "killed", (), process=mine)
    write_job(folder, SweepJob(0, "killed", (), process=(mine[0], mine[1] - 1)))  # another process had that number
    code, said = sweep("--resume", "swept", "sampling.seed=1")
    assert code == 0 and read_run(folder).status == "completed"
    assert len(list(Path("swept/earlier").iterdir())) == 1


def test_what_a_job_does_is_told_by_its_configuration_and_texts():
    def of(prompt: str = "a", text: str = "full", **keys) -> str | None:
        config = OmegaConf.create({"record": {"text": text}, "backend": {"name": "eager"}, **keys})
        return work_hash(config, CommandLine(prompts=[Prompt(prompt)]))

    assert of() == of() is not None
    assert len({of(), of("b"), of(seed=1), of(seed=2), of(text="hash")}) == 5
    assert of(api_key="a") == of(api_key="b")  # a hash of a secret could be found out
    assert of(text="off") is None


def test_no_combination_of_a_sweep_that_cannot_be_composed_runs(sweep):
    code, said = sweep("sampling.sed=1,2")
    assert code == 2
    assert "unknown key 'sampling.sed'" in said and len(said.strip().splitlines()) == 1
    assert not list(Path().rglob("report.html"))


def test_a_sweeper_that_is_not_installed_is_named_with_what_brings_it(sweep):
    with suppress(PackageNotFoundError):
        version("hydra-optuna-sweeper")
        pytest.skip("hydra-optuna-sweeper is installed")
    code, said = sweep("hydra/sweeper=optuna")
    assert code == 2
    assert said.strip() == "xinfer: hydra/sweeper=optuna is not installed: pip install 'xinfer[sweeps]'"


@pytest.mark.slow
def test_an_interrupted_sweep_has_a_report_and_its_job_a_record(tiny_llama: Path, tmp_path: Path):
    words = ["--model", str(tiny_llama), "--prompt", "x", "sampling.seed=1,2", "--max-tokens", "null"]
    long = ["sampling.ignore_eos=true", "engine.max_num_batched_tokens=8", "hydra.sweep.dir=swept"]
    requests = tmp_path / "many.jsonl"
    requests.write_text('{"prompt": "a"}\n' * 200)
    command = [sys.executable, "-m", "xinfer", "-m", *words, *long, "--requests", str(requests)]
    process = subprocess.Popen(
        [*command, "engine.max_num_seqs=1"], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (tmp_path / "swept/0/xinfer.log").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)  # the sweep alone, not its job
    assert process.wait(timeout=120) == 130
    (job,) = jobs(tmp_path / "swept")
    assert (job["status"], job["error"]) == ("interrupted", "interrupted")
    assert read_run(tmp_path / "swept/0").status == "interrupted"


@pytest.mark.slow
def test_jobs_that_a_launcher_runs_in_parallel_are_all_in_the_report(sweep):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    Path("trouble").touch()
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=swept"]
    code, said = sweep(*words, "backend.killed=false,true", "sampling.seed=1,2")
    assert code == 3, said
    assert [job["status"] for job in jobs(Path("swept"))] == ["completed", "completed", "failed", "failed"]
    assert {read_run(Path(f"swept/{number}")).info["seed"] for number in (0, 1)} == {1, 2}


@pytest.mark.slow
def test_a_sweeper_looks_for_the_best_by_a_figure_of_the_jobs(sweep):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=3", "hydra.sweep.dir=swept"]
    code, said = sweep(
        *words, "sweep.objective=generated_tokens", "hydra.sweeper.direction=maximize", "sampling.n=choice(1,3)"
    )
    assert code == 0, said
    best = OmegaConf.load("swept/optimization_results.yaml")
    measured = {job["settings"]["sampling.n"]: job["figures"]["generated_tokens"] for job in jobs(Path("swept"))}
    assert best.best_value == max(measured.values()) == measured[str(best.best_params["sampling.n"])]
    code, said = sweep(*words, "sweep.objective=generated_tokns", "sampling.n=choice(1,3)")
    assert code == 2
    assert "sweep.objective='generated_tokns' is no figure of it (did you mean 'generated_tokens'" in said
    code, said = sweep(*words, "sampling.n=choice(1,3)")
    assert code == 2
    assert "job 0: sweep.objective must name the figure to look for the best of, such as tpot_ms" in said
