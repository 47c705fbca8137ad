"""What needs no MLflow: its keys, and that nothing happens unasked."""

import subprocess
import sys

import pytest
from xinfer_mlflow import MlflowConfig, MlflowPlugin

from xinfer.errors import ConfigError
from xinfer.records import Run


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tracking_uri": "https://example.org"}, "'https://example.org' is not on this machine"),
        ({"tracking_uri": "databricks"}, "'databricks' is not on this machine"),
        ({"steps": -1}, "plugin.mlflow.steps=-1 is out of range"),
    ],
)
def test_keys_that_can_not_be_are_refused(keys, reason: str):
    with pytest.raises(ConfigError, match=reason):
        MlflowConfig(**keys)


def test_a_run_that_does_not_ask_for_it_is_not_followed():
    plugin = MlflowPlugin()
    plugin.xinfer_on_run_start(Run(None, {"config": {"task": "generate", "plugin": {}}}))
    plugin.xinfer_on_step(None)
    plugin.xinfer_on_run_end(Run(None, {"status": "completed"}))


def test_mlflow_is_not_imported_unasked():
    code = "import sys, xinfer_mlflow; sys.exit('mlflow' in sys.modules)"
    path = [*sys.path]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"], timeout=120)
    assert done.returncode == 0
