"""What keeps the house in order: import directions, documented hooks, a conf/ that composes, a README that is true."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import xinfer
from xinfer import hookspecs
from xinfer.composing import config_folder, register
from xinfer.config import keys
from xinfer.plugins import load_plugins

ROOT = Path(xinfer.__file__).parent
REPOSITORY = ROOT.parent
MODULES = sorted(ROOT.rglob("*.py"))

# What a part must not import, as DESIGN.md draws the house.
FORBIDDEN = {
    "engine": ("models", "backends", "records", "tasks", "api", "config", "plugins", "session", "cli"),
    "models": ("backends", "records", "tasks", "api", "config", "plugins", "session", "cli"),
    "backends": ("records", "tasks", "api", "config", "plugins", "session", "cli"),
    "records": ("backends", "models", "tasks", "api", "config", "plugins", "session", "cli"),
    "api": ("records", "tasks", "testing", "cli"),
    "testing": ("tasks", "api", "cli"),
}


def imports(path: Path) -> set[str]:
    """Names of xinfer's modules that a file imports, those for type checkers only left out."""
    found = set()
    tree = ast.parse(path.read_text("utf-8"))
    guarded = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.startswith("xinfer")}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_go_one_way(part: str):
    for path in sorted((ROOT / part).rglob("*.py")):
        for name in imports(path):
            for forbidden in FORBIDDEN[part]:
                assert not (name + ".").startswith(f"xinfer.{forbidden}."), f"{path} imports {name}"


def test_no_backend_imports_another():
    for folder in (path for path in (ROOT / "backends").iterdir() if path.is_dir()):
        for path in folder.rglob("*.py"):
            others = {n for n in imports(path) if n.startswith("xinfer.backends.")}
            backends = {n.split(".")[2] for n in others} - {folder.name, "Backend", "BackendContext"}
            assert not backends, f"{path} imports {backends}"


def test_only_the_command_line_and_tasks_see_hydra():
    for path in MODULES:
        text = path.read_text("utf-8")
        if re.search(r"^\s*(import hydra|from hydra)", text, re.MULTILINE):
            assert path.name in ("cli.py", "composing.py") or path.parent.name == "tasks", path


def modules() -> list[str]:
    found = pkgutil.walk_packages(xinfer.__path__, "xinfer.")
    return [m.name for m in found if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_every_module_says_what_it_offers(name: str):
    module = importlib.import_module(name)
    assert module.__doc__
    for exported in module.__all__:
        assert hasattr(module, exported), f"{name}.__all__ names {exported}"
    assert list(module.__all__) == sorted(module.__all__)


def test_every_hook_is_documented_and_tested():
    tests = "".join(path.read_text("utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    for name, hook in inspect.getmembers(hookspecs, inspect.isfunction):
        if name.startswith("xinfer_"):
            assert hook.__doc__ and len(hook.__doc__.splitlines()) == 1, name
            assert name in tests, f"no test uses {name}"
            assert name in readme, f"README.md does not mention {name}"


def choices() -> list[str]:
    folder = config_folder()
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*.yaml")) if path.parent != folder]
    return [f"{'+' if path.parts[0] == 'experiment' else ''}{path.parent}={path.stem}" for path in files]


@pytest.mark.parametrize("choice", choices())
def test_everything_in_conf_composes(choice: str):
    register(load_plugins())
    OmegaConf.register_new_resolver("xinfer_id", lambda: "0", replace=True)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides=[choice])
    typed = OmegaConf.to_object(config) if choice != "model=custom" else None
    assert typed is None or typed.task


def test_conf_holds_no_code():
    assert not list(config_folder().rglob("*.py"))


def test_every_key_is_in_the_readme_or_explained_in_its_class():
    from xinfer import config, task_configs

    documented = (
        inspect.getsource(config) + inspect.getsource(task_configs) + (REPOSITORY / "README.md").read_text("utf-8")
    )
    assert all(key.rpartition(".")[2] in documented for key in keys())


def commands(readme: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- (\w+) -->\n```[a-z]*\n(.+)\n```", readme))


def test_the_readmes_python_runs(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    examples = re.findall(r"<!-- example -->\n```python\n(.+?)```", readme, re.DOTALL)
    assert len(examples) == 2
    for name in ("LLM", "AsyncEngine"):  # a small model, so that it takes no time
        monkeypatch.setitem(vars(xinfer), name, partial(getattr(xinfer, name), tiny_llama))
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()


def test_ci_runs_the_readmes_commands():
    found = commands((REPOSITORY / "README.md").read_text("utf-8"))
    assert found["run"] == "pip install -e . && python -m xinfer"
    assert found["test"] == "pip install -e '.[dev]' && pytest -n logical"
    ci = (REPOSITORY / ".ci" / "run").read_text("utf-8")
    assert "readme run" in ci and "readme test" in ci


def test_files_stay_readable():
    for path in MODULES:
        lines = path.read_text("utf-8").splitlines()
        assert len(lines) <= 310, f"{path} has {len(lines)} lines: split it along a real seam"


def test_a_wheel_has_what_is_no_code(tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([*pip, str(REPOSITORY)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("xinfer-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"xinfer/models/quantize/sample.txt", "xinfer/conf/config.yaml"} <= names
    assert not [name for name in names if name.startswith("tests/")]
