"""The keys of single tasks; `config.py` has those that all tasks share."""

__all__ = [
    "AuditConfig",
    "BenchConfig",
    "DiffConfig",
    "ExportConfig",
    "PluginsConfig",
    "ReplayConfig",
    "RunsConfig",
    "SweepConfig",
    "WhyConfig",
]

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


@dataclass
class ReplayConfig:
    """What of a recorded run the task `replay` runs again.

    Attributes:
        first: of one request, the text goes on from this token of the answer, with those before it as recorded.
        resume: only what the run did not finish, each text from where it came.
    """

    first: int = 0
    resume: bool = False


@dataclass
class WhyConfig:
    """Which tokens of a recorded run the task `why` explains.

    Attributes:
        token: which token of the answer, counted from 0; null tells of all of them how little would have flipped each.
        top: candidates that are shown at each stage.
        noise: what tokens are to survive: a precision (float32, bfloat16, float16, int8, fp8, int4), or a number,
            by which no margin may be smaller; null tells of every precision.
    """

    token: int | None = None
    top: int = 5
    noise: str | None = None


@dataclass
class DiffConfig:
    """What the task `diff` compares, and when it fails.

    Attributes:
        a, b: two sides, each a backend or a run's folder.
        a_overrides, b_overrides: what is different of each, as `key=value`; on the command line `a.KEY=VALUE`.
        tokens: of each text at most.
        texts: windows of the shipped text, where neither a run nor prompts are given.
        layers: whether to look for the first layer that differs.
        max_kl, min_top1, max_difference: the check fails where the mean divergence (nats a token) or the largest
            difference of logits is above, or the agreement of the likeliest token below.
    """

    a: str = "eager"
    b: str = "onnx"
    a_overrides: list[str] = field(default_factory=list)
    b_overrides: list[str] = field(default_factory=list)
    tokens: int = 512
    texts: int = 4
    layers: bool = True
    max_kl: float | None = None
    min_top1: float | None = None
    max_difference: float | None = None


@dataclass
class AuditConfig:
    """What the task `audit` tries.

    Attributes:
        only: of the things that should not change tokens, these; null for all that can be tried here.
        prompts: requests that it makes up, where none are given.
        tokens: that each of them generates.
    """

    only: list[str] | None = None
    prompts: int = 6
    tokens: int = 32


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


@dataclass
class PluginsConfig:
    """What the task `plugins` does.

    Attributes:
        action: null lists plugins, `new` writes a package with a backend, `check` tests one against the contract.
        name: the backend's; `check` takes the configured one if it is null.
    """

    action: str | None = None
    name: str | None = None
