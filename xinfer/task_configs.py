"""The keys of single tasks; `config.py` has those that all tasks share."""

__all__ = ["ExportConfig", "RunsConfig", "SweepConfig"]

from dataclasses import dataclass, field


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
class RunsConfig:
    """Which recorded runs the task `runs` tells of.

    Attributes:
        words: what to do and with what, as on the command line: words to search by; `show RUN`; `compare RUN RUN ...`.
        folder: where runs are looked for, in folders within folders.
        sort: a field or a figure, with a minus from the largest or latest on.
        limit: runs to list at most; null lists all.
    """

    words: list[str] = field(default_factory=list)
    folder: str = "outputs"
    sort: str = "-started"
    limit: int | None = 20


@dataclass
class SweepConfig:
    """What a sweep (`-m`) makes of its jobs.

    Attributes:
        objective: the figure of a job, by its name in stats.json, that a sweeper such as optuna looks for the best of.
    """

    objective: str | None = None
