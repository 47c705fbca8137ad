"""`plugins new` writes a package that installs, works and keeps the contract; `plugins check` tells."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from xinfer.backends import BackendContext
from xinfer.config import Config
from xinfer.engine.engine import Engine
from xinfer.engine.runner import LEVELS
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError, PluginError, UsageError
from xinfer.plugins import load_plugins
from xinfer.task_configs import PluginsConfig
from xinfer.tasks import Job
from xinfer.tasks.plugins import run
from xinfer.tasks.scaffold import files, write_plugin

GUIDE = Path(__file__).parent.parent.parent / "plugins" / "README.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new package."""
    return write_plugin("echo", (), tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def installed(made: Path) -> Path:
    """The folder into which pip installed it, without asking anybody."""
    target = made.parent / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", str(target), str(made)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return target


def test_it_keeps_the_contract_and_goes_on_as_its_text_went_on(conformance_kit, one_thread):
    module = types.ModuleType("xinfer_echo")
    exec(compile(files("echo")["xinfer_echo/__init__.py"], "xinfer_echo", "exec"), vars(module))
    (backend,) = module.xinfer_backends()
    found = conformance_kit([backend])("echo")
    assert (found.code, found.failed) == (0, {})
    assert {"test_blocks_may_lie_in_any_order", *(f"test_level_{level}" for level in LEVELS)} <= set(found.passed)
    context = BackendContext(None, backend.config(), Limits(max_model_len=64))
    engine = Engine(backend.create(context), backend.tokenizer(context), context.limits)
    engine.add_request(list(b"one two three one two three one "), SamplingParams(temperature=0.0, max_tokens=9))
    assert [output.text for step in engine.run() for output in step.finished] == ["two three"]


@pytest.mark.slow
def test_its_own_tests_pass_the_conformance_kit_among_them(made: Path, installed: Path):
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "tests"],
        cwd=made,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"echo, 8 sequences, in float32 on cpu: prefill [\d,]+ tokens/s", done.stdout)
    assert "backend echo computes no checkpoint" in done.stdout, "what is skipped is skipped by name"


def test_its_backend_has_less_than_a_hundred_lines():
    assert len(files("echo")["xinfer_echo/__init__.py"].splitlines()) < 100


def test_the_guide_shows_the_package_as_it_is_written():
    blocks = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE))
    written = files("echo")
    assert {place: written[place] for place in blocks} == blocks
    assert {"pyproject.toml", "xinfer_echo/__init__.py", "tests/test_echo.py"} <= set(blocks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "needs a name"),
        ("class", "can't be the name"),
        ("True", "can't be the name"),
        ("null", "can't be the name"),
        ("my-kernel", "such as my_kernel"),
        ("../x", "can't be the name"),
        ("9lives", "can't be the name"),
        ("x" * 41, "40 at most"),
        ("eager", "there already: take another"),
        ("pytest", "there already: take another"),  # xinfer_pytest is a module of xinfer's
    ],
)
def test_a_name_that_can_not_be_one_is_refused_and_leaves_nothing(name: str | None, message: str, tmp_path: Path):
    with pytest.raises((ConfigError, PluginError), match=message):
        write_plugin(name, {"eager"}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone(made: Path):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="is there already"):
        write_plugin("echo", (), made.parent)
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_the_command_line_takes_words(xinfer, tmp_path: Path):
    done = xinfer("plugins", "new", "my_kernel")
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install -e xinfer-my_kernel" in done.stdout
    assert (tmp_path / "xinfer-my_kernel" / "xinfer_my_kernel" / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("wanted", "overrides", "message"),
    [
        (PluginsConfig("nwe"), (), "did you mean 'new'"),
        (PluginsConfig("new"), (), "needs a name"),
        (PluginsConfig("new", "fake"), (), "there already"),
        (PluginsConfig("check", "eagre"), (), "did you mean 'eager'"),
        (
            PluginsConfig("check", "onnx"),
            ("backend.threads=1",),
            "threads=1 is a key of backend=eager: give backend=onnx",
        ),
    ],
)
def test_what_can_not_be_done_is_said(wanted: PluginsConfig, overrides: tuple[str, ...], message: str):
    config = Config(task="plugins", backend=types.SimpleNamespace(name="eager"), plugins=wanted)
    with pytest.raises(UsageError, match=message):
        run(config, Job(load_plugins(), (), Path(), overrides, {}, {}))


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1), (2, 130), (3, 3), (4, 2), (5, 3), (-9, 3)])
def test_check_passes_the_kits_verdict_on(code: int, exit_code: int, monkeypatch: pytest.MonkeyPatch):
    commands = []
    done = subprocess.CompletedProcess([], code)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command) or done)
    config = Config(task="plugins", backend=types.SimpleNamespace(name="onnx"), plugins=PluginsConfig("check"))
    assert run(config, Job(load_plugins(), (), Path(), ("backend=onnx", "backend.threads=1"), {}, {})) == exit_code
    assert commands[0][-3:] == ["--backend", "onnx", "--backend-key=threads=1"]
