"""What the plugins' tests share: their packages are found as if pip had installed them."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = sorted(path.parent for path in Path(__file__).parent.glob("*/pyproject.toml"))

sys.path += map(str, PACKAGES)  # at its end, so that one that is really installed comes first


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH by which the packages and their entry points are found."""
    site = tmp_path_factory.mktemp("site")
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
        folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        points = (f"{name} = {module}\n" for name, module in project["entry-points"]["xinfer"].items())
        (folder / "entry_points.txt").write_text("[xinfer]\n" + "".join(points))
    return os.pathsep.join([str(site), *map(str, PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def xinfer(installed: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m xinfer` with the plugins as a process of its own in an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "xinfer", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": installed} | environment,
            timeout=240,
        )

    return run
