"""The keys of single tasks; `config.py` has those that all tasks share."""

__all__ = ["ExportConfig"]

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
