"""One run in MLflow: what it was asked for as params, its figures as metrics, where it ran as tags, its files."""

__all__ = ["Tracker", "flat"]

import json
import logging
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from time import time
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported: nothing leaves the machine

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from xinfer.engine.outputs import StepStats
from xinfer.records import Run
from xinfer_mlflow import MlflowConfig

_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_STEP = ("batch_size", "step_ms", "scheduler_queue_length", "kv_blocks_used", "prefill_tokens", "generated_tokens")
_FILES, _TEXTS = ("run.json", "stats.json", "steps.jsonl"), ("requests.jsonl", "report.html")
_SETTINGS = ("seed", "sampling")  # of stats.json, what is no figure
_AT_ONCE = 100  # params or tags; of metrics it takes ten times as many


class Tracker:
    """Writes when the run begins and when it ends; what it hears between is kept till then: steps don't wait."""

    def __init__(self, run: Run, config: MlflowConfig) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._config, self._metrics = config, list[Metric]()
        self._client = MlflowClient(config.tracking_uri)
        tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": shlex.join(run.info["command"])} | config.tags
        created = self._client.create_run(self._experiment(), tags=tags, run_name=run.info.get("id"))
        self.run_id: str = created.info.run_id
        self._params({k: v for k, v in flat(run.info["config"]) if not k.startswith("plugin.mlflow.")})

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._config.experiment)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(self._config.experiment))
        except MlflowException:  # another job of a sweep was faster
            return str(self._client.get_experiment_by_name(self._config.experiment).experiment_id)

    def _params(self, values: Mapping[str, Any]) -> None:
        params = [Param(k, v if isinstance(v, str) else json.dumps(v, default=str)) for k, v in values.items()]
        for first in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self.run_id, params=params[first : first + _AT_ONCE])

    def step(self, stats: StepStats) -> None:
        """Keep one step's figures, if it is one of those."""
        if self._config.steps and stats.step % self._config.steps == 0:
            now = int(time() * 1000)
            self._metrics += [Metric(f"step/{name}", getattr(stats, name), now, stats.step) for name in _STEP]

    def end(self, run: Run) -> None:
        """Write all that is known now; a run that was refused before it computed anything is deleted."""
        if run.info["status"] == "refused":
            self._client.delete_run(self.run_id)
            return
        effective = {f"effective.{k}": v for k, v in flat(run.stats.get("sampling") or {})}
        self._params(effective | {k: run.info[k] for k in ("seed",) if k in run.info})
        now = int(time() * 1000)
        figures = dict(flat({k: v for k, v in run.stats.items() if k not in _SETTINGS}))
        self._metrics += [Metric(k, float(v), now, 0) for k, v in figures.items() if _is_figure(v)]
        for first in range(0, len(self._metrics), 10 * _AT_ONCE):
            self._client.log_batch(self.run_id, metrics=self._metrics[first : first + 10 * _AT_ONCE])
        tags = [RunTag(k, str(v)) for k, v in _tags(run.info).items() if v is not None]
        self._client.log_batch(self.run_id, tags=tags)
        for name in (*_FILES, *(_TEXTS if self._config.texts else ())):
            if run.folder is not None and (run.folder / name).is_file():
                self._client.log_artifact(self.run_id, str(run.folder / name))
        self._client.set_terminated(self.run_id, _STATUS[run.info["status"]])


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values with dotted names; a mapping without any is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tags(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return where and of what a run was, as far as its record knows."""
    git, hardware = info.get("git") or {}, info.get("hardware") or {}
    return {
        "mlflow.source.git.commit": git.get("commit"),
        "xinfer.git_dirty": git.get("dirty"),
        "xinfer.version": info["versions"].get("xinfer"),
        "xinfer.content_hash": info.get("content_hash"),
        "xinfer.cpu": hardware.get("cpu"),
        "xinfer.cores": hardware.get("physical_cores"),
        "xinfer.gpus": ", ".join(map(str, hardware.get("gpus") or ())) or None,
        "xinfer.hardware": hardware.get("key"),
        "xinfer.device": (info.get("runner") or {}).get("device"),
        "xinfer.status": info["status"],
        "xinfer.error": info.get("error"),
    }
