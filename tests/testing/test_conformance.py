"""The conformance kit passes a backend that is right, and fails each wrong one by the test that is named for it."""

import types
from pathlib import Path

import pytest
from broken import CAUGHT_BY

from xinfer import plugins
from xinfer.backends import Backend
from xinfer.backends.torch import EagerConfig, supports
from xinfer.hookspecs import hookimpl

pytestmark = pytest.mark.usefixtures("one_thread")


class Outcomes:
    """What came of each test of a session, by its name without parameters; of a failure its text."""

    def __init__(self) -> None:
        self.passed, self.skipped, self.failed = set(), set(), {}

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed[name] = str(report.longrepr)
        elif report.skipped:
            self.skipped.add(name)
        elif report.when == "call":
            self.passed.add(name)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run the kit, or one of its tests, on a backend in this process; the broken runners are backends of a plugin."""
    offered = [Backend(wrong.__name__, EagerConfig, wrong, "wrong", supports=supports) for wrong in CAUGHT_BY]
    module = types.ModuleType("broken_backends")
    module.xinfer_backends = hookimpl(lambda: offered)
    module.xinfer_backends.__name__ = "xinfer_backends"
    entry = types.SimpleNamespace(name="broken", dist=None, load=lambda: module)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    monkeypatch.delenv("XINFER_PLUGINS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(backend: str, *words: str, tests: str = "") -> Outcomes:
        file, _, name = tests.partition("::")
        chosen = f"xinfer.testing.conformance.{file}::{name}" if tests else "xinfer.testing"
        own = ["-p", "xinfer_pytest", "-p", "no:cacheprovider", "-q", "-c", str(tmp_path / "pytest.ini")]
        outcomes = Outcomes()
        arguments = [*own, f"--basetemp={tmp_path / 'kit'}", "--pyargs", chosen, "--backend", backend, *words]
        outcomes.code = pytest.main(arguments, plugins=[outcomes])
        return outcomes

    return run


def test_a_backend_that_is_right_passes(kit, capfd: pytest.CaptureFixture[str]):
    found = kit("eager", "-m", "quick")
    assert (found.code, found.failed) == (0, {})
    assert found.skipped == {"test_freed_blocks_harm_no_other"}
    named = {name.partition("::")[2] for name in CAUGHT_BY.values()}
    assert named - {"test_memory_is_given_back_on_close"} <= found.passed | found.skipped
    assert "tokens/s" in capfd.readouterr().out


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda wrong: wrong.__name__)
def test_a_wrong_runner_fails_by_name(kit, wrong: type):
    found = kit(wrong.__name__, tests=CAUGHT_BY[wrong])
    assert [*found.failed] == [CAUGHT_BY[wrong].partition("::")[2]]
