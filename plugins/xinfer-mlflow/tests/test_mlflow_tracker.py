"""What MLflow holds of a run is what the run's folder says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

from mlflow.entities import Run as MlflowRun
from mlflow.entities import ViewType
from mlflow.tracking import MlflowClient
from xinfer_mlflow import MlflowPlugin

from xinfer import Engine, Limits, SamplingParams
from xinfer.engine.engine import Observers
from xinfer.records import Run
from xinfer.testing.fake import FakeRunner
from xinfer.testing.tiny import tiny_config, write_folder

SECRET = "the word is Shibboleth"


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    write_folder(tmp_path / "tiny", tiny_config("llama"), seed=0)
    return "tiny"


def runs_in(folder: Path, experiment: str = "xinfer", view: int = ViewType.ACTIVE_ONLY) -> list[MlflowRun]:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id], run_view_type=view))


def files_of(run: MlflowRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(run.info.artifact_uri).iterdir()}


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_a_run_is_there_with_its_figures_and_files_but_not_its_texts(xinfer, tiny: str, tmp_path: Path):
    words = ["--model", tiny, "--prompt", SECRET, "--max-tokens", "9", "--seed", "5"]
    done = xinfer("+plugin/mlflow=default", "plugin.mlflow.steps=4", "+plugin.mlflow.tags.team=a", *words)
    assert done.returncode == 0, done.stderr
    (run,), (folder,) = runs_in(tmp_path), (tmp_path / "outputs").glob("*/*")
    info, stats = (json.loads((folder / f"{name}.json").read_text()) for name in ("run", "stats"))
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.name
    assert run.data.params["seed"] == run.data.params["sampling.seed"] == "5"
    assert run.data.params["model.reference"] == "tiny"
    assert run.data.params["effective.top_p"] == "0.95"
    tags = {"team": "a", "xinfer.content_hash": info["content_hash"], "xinfer.cpu": info["hardware"]["cpu"]}
    assert tags.items() <= run.data.tags.items()
    figures = {k: v for k, v in leaves(stats) if type(v) in (int, float) and not k.startswith(("seed", "sampling."))}
    assert figures.items() <= run.data.metrics.items()
    assert {"ttft_ms", "decode_tok_s", "percentiles.itl_ms.p99"} <= figures.keys()
    history = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_metric_history(run.info.run_id, "step/step_ms")
    assert [metric.step for metric in history] == [0, 4, 8]
    assert files_of(run).keys() == {"run.json", "stats.json", "steps.jsonl"}
    assert files_of(run)["run.json"] == (folder / "run.json").read_bytes()
    kept = [*(tmp_path / "mlruns").rglob("*"), tmp_path / "mlflow.db"]
    assert not [path for path in kept if path.is_file() and b"Shibboleth" in path.read_bytes()]


def test_texts_are_there_where_they_are_asked_for(xinfer, tiny: str, tmp_path: Path):
    words = ["--model", tiny, "--prompt", SECRET, "--max-tokens", "3", "plugin.mlflow.texts=true"]
    assert xinfer("+plugin/mlflow=default", "plugin.mlflow.experiment=mine", *words).returncode == 0
    (run,) = runs_in(tmp_path, "mine")
    assert SECRET.encode() in files_of(run)["requests.jsonl"]
    assert b"</html>" in files_of(run)["report.html"]


def test_a_tracker_that_fails_does_not_harm_the_run(xinfer, tiny: str, tmp_path: Path):
    words = ["--model", tiny, "--prompt", "a", "--max-tokens", "5", "--temperature", "0"]
    done = xinfer("+plugin/mlflow=default", "plugin.mlflow.tracking_uri=sqlite:///tiny/config.json/x.db", *words)
    assert done.returncode == 0
    assert done.stderr.count("plugin 'mlflow' raised and is not called any more") == 1
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert "mlflow" in json.loads((folder / "run.json").read_text())["silenced_plugins"]
    assert len(json.loads((folder / "requests.jsonl").read_text().splitlines()[-1])["token_ids"]) == 5


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> tuple[MlflowPlugin, Run]:
    """Return a plugin that follows a run which has just begun."""
    monkeypatch.chdir(tmp_path)
    keys["tracking_uri"] = f"sqlite:///{tmp_path}/mlflow.db"
    config = {"task": "generate", "sampling": {"seed": 1, "stop_token_ids": []}, "plugin": {"mlflow": keys}}
    run = Run(None, {"id": "one", "config": config, "command": ["xinfer"], "versions": {"xinfer": "1"}})
    plugin = MlflowPlugin()
    plugin.xinfer_on_run_start(run)
    return plugin, run


@pytest.mark.parametrize(
    ("status", "theirs"), [("completed", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")]
)
def test_a_run_ends_there_as_it_ended(status: str, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plugin, run = begun(tmp_path, monkeypatch)
    assert [each.info.status for each in runs_in(tmp_path)] == ["RUNNING"]
    stats = {"seed": 7, "ttft_ms": 1.5, "stream": None, "streaming": True, "tpot_ms": float("nan"), "device": "cpu"}
    plugin.xinfer_on_run_end(replace(run, info={**run.info, "status": status, "seed": 7}, stats=stats))
    (ended,) = runs_in(tmp_path)
    assert ended.info.status == theirs
    assert ended.data.metrics == {"ttft_ms": 1.5}
    assert ended.data.params == {
        "task": "generate",
        "sampling.seed": "1",
        "sampling.stop_token_ids": "[]",
        "seed": "7",
    }


def test_a_run_that_was_refused_is_deleted_and_the_next_shares_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plugin, run = begun(tmp_path, monkeypatch)
    plugin.xinfer_on_run_end(replace(run, info={**run.info, "status": "refused"}))
    assert runs_in(tmp_path) == []
    assert len(runs_in(tmp_path, view=ViewType.ALL)) == 1
    begun(tmp_path, monkeypatch)
    assert len(runs_in(tmp_path)) == 1


@pytest.mark.parametrize(("steps", "kept"), [(0, []), (1, [0, 1, 2, 3, 4]), (3, [0, 3])])
def test_every_so_many_steps_become_metrics(
    steps: int, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plugin, run = begun(tmp_path, monkeypatch, steps=steps)
    engine = Engine(FakeRunner(), None, Limits(), observers=Observers(on_step=(plugin.xinfer_on_step,)))
    engine.add_request([1, 2], SamplingParams(max_tokens=5, ignore_eos=True))
    list(engine.run())
    plugin.xinfer_on_run_end(replace(run, info={**run.info, "status": "completed"}))
    (ended,) = runs_in(tmp_path)
    history = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_metric_history(ended.info.run_id, "step/batch_size")
    assert [metric.step for metric in history] == kept
