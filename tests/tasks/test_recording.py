"""A run's end: what is in its folder when plugins hear of it."""

import types
from pathlib import Path

import pytest

from xinfer import plugins
from xinfer.engine.outputs import GenerateStats
from xinfer.engine.stats import summarize
from xinfer.engine.types import Request, SamplingParams
from xinfer.errors import ConfigError
from xinfer.hookspecs import hookimpl
from xinfer.plugins import load_plugins
from xinfer.records import Run, RunRecord
from xinfer.tasks import Job
from xinfer.tasks.recording import recording


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A job in a folder, with a plugin that notes which files are there when it hears of the end."""
    found: list[tuple[str, bool]] = []

    def on_end(run: Run) -> None:
        found.append((run.info["status"], (tmp_path / "run" / "report.html").is_file()))

    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    loaded = load_plugins()
    listener = types.ModuleType("listener")
    on_end.__name__ = "xinfer_on_run_end"
    listener.xinfer_on_run_end = hookimpl(on_end)
    loaded.manager.register(listener)
    return Job(loaded, (), tmp_path / "run", (), {"task": "generate"}, {}), found


FIGURES = summarize(list[GenerateStats](), 1.0)
PLACES = {"resident_weight_bytes": 1, "kv_cache_bytes": 1, "dtype": "float32", "device": "cpu", "peak_memory_bytes": 1}


def test_plugins_hear_of_the_end_when_the_report_is_written(heard):
    job, found = heard
    record = RunRecord(job.folder)
    with recording(record, job) as figures:
        record.request(Request("0", 0, (1,), SamplingParams(), 0), {"prompt": "a", "chat": False})
        figures |= FIGURES | PLACES | {"roofline": None}
    assert found == [("completed", True)]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_run_that_came_to_no_end_has_no_report(error: type[BaseException], status: str, heard):
    job, found = heard
    with pytest.raises(error), recording(RunRecord(job.folder), job):
        raise error
    assert found == [(status, False)]


def test_a_refused_run_leaves_no_folder_but_is_told(heard):
    job, found = heard
    with pytest.raises(ConfigError), recording(RunRecord(job.folder), job):
        raise ConfigError("no")
    assert found == [("refused", False)]
    assert not job.folder.exists()
