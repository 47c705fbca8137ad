"""What several tests need: the real model, and tiny ones."""

import os

# As many workers as there are cores leave one to each; threads of torch that have none to run on look for work instead.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, settings

from xinfer import plugins
from xinfer.backends import Backend
from xinfer.cli import run
from xinfer.composing import default_model
from xinfer.engine.runner import ModelRunner
from xinfer.hookspecs import hookimpl
from xinfer.models.sources import resolve
from xinfer.testing.fake import FakeRunner, FakeTokenizer
from xinfer.testing.tiny import tiny_config, write_folder

# torch's store asks DNS for the name of each process that comes; where nobody answers, for ten seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples on every run, and no clock: a test must not depend on the machine's speed.
settings.register_profile(
    "xinfer", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("xinfer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workload", type=int, help="the number of the one workload that tests/engine/test_fuzz.py runs")


@pytest.fixture(scope="module")
def one_thread():
    """For modules of tiny products, which are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file, fetched once into the user's cache."""
    return resolve(default_model())


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random llama."""
    return write_folder(tmp_path_factory.mktemp("models") / "llama", tiny_config("llama"), seed=0)


@pytest.fixture
def xinfer(tmp_path: Path):
    """Run `python -m xinfer` as a process of its own in an empty folder; returns what it printed."""

    def run(*arguments: str, text: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "xinfer", *arguments],
            cwd=tmp_path,
            input=text,
            capture_output=True,
            text=True,
            env=os.environ | environment,
            timeout=240,
        )

    return run


@pytest.fixture
def write_run():
    """Write a run's folder by hand: run.json with these changes, stats.json with these figures; returns the folder."""

    def write(folder: Path, stats: dict | None = None, command: Sequence[str] = (), **changes) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        info = {
            "status": "completed",
            "started": "2026-11-29T12:00:00+00:00",
            "task": "generate",
            "command": ["python", "-m", "xinfer", *command],
            "config": {"backend": {"name": "eager"}, "model": {"quantization": None}, "record": {"text": "full"}},
            "model": {"reference": "/models/Tiny-Llama/"},
            "runner": {"dtype": "float32", "device": "cpu"},
            "versions": {"torch": "2.13.0"},
            "hashes": {"weights": "abc"},
            "content_hash": "def",
            "seed": 7,
        }
        (folder / "run.json").write_text(json.dumps(info | changes))
        if stats is not None:
            (folder / "stats.json").write_text(json.dumps(stats))
        return folder

    return write


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch):
    """Install a plugin whose backend `fake` has this runner, by default a `FakeRunner`; returns the runners it made."""

    def install(create: Callable[[], ModelRunner] = FakeRunner) -> list[ModelRunner]:
        made: list[ModelRunner] = []

        def remember(context) -> ModelRunner:
            made.append(create())
            return made[-1]

        backend = Backend("fake", make_dataclass("Fake", []), remember, tokenizer=lambda context: FakeTokenizer())
        module = types.ModuleType("fake")
        module.xinfer_backends = hookimpl(lambda: [backend])
        module.xinfer_backends.__name__ = "xinfer_backends"
        monkeypatch.setattr(EntryPoint, "load", lambda entry: module)
        monkeypatch.setattr(plugins, "entry_points", lambda group: [EntryPoint("fake", "fake", "xinfer")])
        monkeypatch.delenv("XINFER_PLUGINS", raising=False)
        return made

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for rows of 260 numbers more only cost time
    yield install
    torch.set_num_threads(threads)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run a command line in this process, in an empty folder; returns (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XINFER_LOG", "error")
    monkeypatch.setattr(sys, "argv", ["xinfer"])

    def call(*words: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        code = run(list(words))
        return code, *capfd.readouterr()

    return call


class Outcomes:
    """What came of each test of a session within this one, by its name without parameters; of a failure its text.

    Attributes:
        code: the session's exit code.
    """

    def __init__(self) -> None:
        self.code, self.passed, self.skipped, self.failed = None, Counter(), Counter(), {}

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed[name] = str(report.longrepr)
        elif report.skipped:
            self.skipped[name] += 1
        elif report.when == "call":
            self.passed[name] += 1


@pytest.fixture
def conformance_kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Install a plugin with these backends; returns what runs the kit on one, or one of its tests, in this process."""

    def install(backends: list[Backend]) -> Callable[..., Outcomes]:
        module = types.ModuleType("backends")
        module.xinfer_backends = hookimpl(lambda: backends)
        module.xinfer_backends.__name__ = "xinfer_backends"
        entry = types.SimpleNamespace(name="tested", dist=None, load=lambda: module)
        monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
        monkeypatch.delenv("XINFER_PLUGINS", raising=False)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        return run

    def run(backend: str, *words: str, tests: str = "") -> Outcomes:
        file, _, name = tests.partition("::")
        chosen = f"xinfer.testing.conformance.{file}::{name}".removesuffix("::") if tests else "xinfer.testing"
        own = ["-p", "xinfer_pytest", "-q", "-c", str(tmp_path / "pytest.ini"), f"--basetemp={tmp_path / 'kit'}"]
        for plugin in ("cacheprovider", "unraisableexception"):  # the latter collects garbage for 0.4 s
            own += ["-p", f"no:{plugin}"]
        outcomes = Outcomes()
        outcomes.code = pytest.main([*own, "--pyargs", chosen, "--backend", backend, *words], plugins=[outcomes])
        return outcomes

    return install
