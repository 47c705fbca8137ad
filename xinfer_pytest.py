"""Gives `pytest --pyargs xinfer.testing --backend NAME` its options; any other session of pytest is left alone.

Outside the package, for pytest imports it in every session, and `xinfer` would bring torch along.
"""

__all__ = ["pytest_load_initial_conftests"]

import pytest


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the conformance kit's options and fixtures where its tests are asked for."""
    if any(argument.startswith("xinfer.testing") for argument in args):
        early_config.pluginmanager.import_plugin("xinfer.testing.conformance.plugin")
