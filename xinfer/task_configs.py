"""The keys of single tasks; `config.py` has those that all tasks share."""

__all__ = ["ExportConfig", "PluginsConfig"]

from dataclasses import dataclass


@dataclass
class ExportConfig:
    """What the task `export` writes.

    Attributes:
        out: the folder, which must not be there yet, or be empty.
        all_logits: whether the graph returns logits of all new tokens, which guessing several tokens at once needs, not
            only of each sequence's last, which is faster.
    """

    out: str | None = None
    all_logits: bool = False


@dataclass
class PluginsConfig:
    """What the task `plugins` does.

    Attributes:
        action: null lists plugins, `new` writes a package with a backend, `check` tests one against the contract.
        name: the backend's; `check` takes the configured one if it is null.
    """

    action: str | None = None
    name: str | None = None
