"""The keys of single tasks; `config.py` has those that all tasks share."""

__all__ = ["BenchConfig", "ExportConfig"]

from dataclasses import dataclass, field
from typing import Any


@dataclass
class BenchConfig:
    """What the task `bench` measures, and what it compares that with.

    Attributes:
        tests: shapes of work: ppN (N tokens of prompt), tgN (N tokens one by one; tgN@C: after C of prompt), ppN+tgM.
        batch: numbers of sequences that run at once, one or a list: each shape runs with each of them.
        repeats: how often each is measured.
        warmup: how often each runs before that, unmeasured.
        against: another backend, measured in the same process, repeat by repeat in turns.
        against_overrides: what else is different on the other side, as overrides (`model.reference=…`).
        against_python: the Python of an environment with another version of xinfer, measured in turns, both in
            processes of their own; slower than that one fails.
        against_checkout: a checkout of another version, likewise, with this Python where no other is named.
        baseline: a file of an earlier run's `save_baseline`, or its bench.json; slower than that fails.
        save_baseline: a file to write what was measured to.
        max_regression: how much slower is too slow, as a share.
        floor_ms: milliseconds below which a difference is no regression, whatever share it is.
        reason: why it takes over a tenth more memory than before, which fails without.
        follow: used by `against_python`: measure when told to on standard input, and tell on standard output.
    """

    tests: Any = field(default_factory=lambda: ["pp512", "tg128"])
    batch: Any = 1
    repeats: int = 5
    warmup: int = 1
    against: str | None = None
    against_overrides: list[str] = field(default_factory=list)
    against_python: str | None = None
    against_checkout: str | None = None
    baseline: str | None = None
    save_baseline: str | None = None
    max_regression: float = 0.05
    floor_ms: float = 0.01
    reason: str | None = None
    follow: bool = False


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
