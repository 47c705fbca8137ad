"""`+plugin/mlflow=default`: each run is a run of MLflow's too, in a database on this machine."""

__all__ = ["MlflowConfig", "MlflowPlugin", "plugin"]

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from xinfer import hookimpl
from xinfer.engine.outputs import StepOutput
from xinfer.errors import ConfigError
from xinfer.records import Run

if TYPE_CHECKING:
    from xinfer_mlflow.tracker import Tracker


@dataclass
class MlflowConfig:
    """Keys of `plugin.mlflow`.

    Attributes:
        tracking_uri: the database, `sqlite:///FILE` (relative to where the command is run) or MLflow's plain folders,
            `file:///FOLDER`; nothing leaves the machine.
        experiment: the name of the experiment that runs belong to; made where it is not there.
        tags: further tags of the run.
        steps: figures of every so many steps become metrics over steps; 0 for none.
        texts: whether prompts and answers are kept: requests.jsonl, and report.html, which shows them.
    """

    tracking_uri: str = "sqlite:///mlflow.db"
    experiment: str = "xinfer"
    tags: dict[str, str] = field(default_factory=dict)
    steps: int = 50
    texts: bool = False

    def __post_init__(self) -> None:
        if urlsplit(self.tracking_uri).scheme not in ("sqlite", "file"):
            raise ConfigError(
                f"plugin.mlflow.tracking_uri={self.tracking_uri!r} is not on this machine: give sqlite:///FILE or "
                "file:///FOLDER"
            )
        if self.steps < 0:
            raise ConfigError(f"plugin.mlflow.steps={self.steps} is out of range: 0 or more is expected")


class MlflowPlugin:
    """Follows one run after the other; without `+plugin/mlflow=default` it does nothing, and MLflow is not imported."""

    def __init__(self) -> None:
        self._tracker: Tracker | None = None

    @hookimpl
    def xinfer_configs(self) -> list[tuple[str, str, type]]:
        """Return the plugin's keys."""
        return [("mlflow", "default", MlflowConfig)]

    @hookimpl
    def xinfer_on_run_start(self, run: Run) -> None:
        """Begin a run of MLflow's, if that is asked for."""
        self._tracker = None
        keys = (run.info["config"].get("plugin") or {}).get("mlflow")
        if keys is not None:
            from xinfer_mlflow.tracker import Tracker

            self._tracker = Tracker(run, MlflowConfig(**keys))

    @hookimpl
    def xinfer_on_step(self, step: StepOutput) -> None:
        """Remember some of the figures."""
        if self._tracker is not None:
            self._tracker.step(step.stats)

    @hookimpl
    def xinfer_on_run_end(self, run: Run) -> None:
        """Write the figures and files, and end the run."""
        if self._tracker is not None:
            self._tracker.end(run)
            self._tracker = None


plugin = MlflowPlugin()
