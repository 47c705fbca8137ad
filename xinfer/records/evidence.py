"""A record's steps and results added up: the figures that the rules of `diagnosis` rest on."""

__all__ = ["Evidence", "Finding", "Step"]

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from xinfer.engine.stats import percentile
from xinfer.engine.types import Limits
from xinfer.records.reader import Entry, RecordedRun

Step = Entry


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that held a run back.

    Attributes:
        name: of the cause.
        share: how much of the requests' time it cost, from 0 to 1; for `host_bound` of the steps' time, for
            `small_batch` the share of places that stayed empty.
        text: what happened, with the numbers that it rests on, and what else could be done.
        setting: what to change, as on the command line; None where no setting changes it.
        numbers: the main ones of the text, by name.
    """

    name: str
    share: float
    text: str
    setting: str | None
    numbers: Mapping[str, float] = field(default_factory=dict)


class Evidence:
    """What a record says, in the measure that all rules share: the time of requests.

    A step of 10 ms with two sequences in it and three that wait takes 50 ms of somebody's time. So waiting, computing
    and standing still are shares of one whole, also in a run that was killed before any request had ended.

    Attributes:
        WORTH: the share from which on a cause is worth a word; less is within what a run differs from the next.
        FEW: values of which a median, or a share, is one.
    """

    WORTH, FEW = 0.1, 5

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.steps: list[Step] = [step for step in run.steps if step["stage"] != "idle"]
        self.decodes = [step for step in self.steps if step["stage"] == "decode"]
        self.config: dict[str, Any] = run.info.get("config") or {}
        given = self.config.get("engine") or {}
        self.limits: dict[str, Any] = asdict(Limits()) | {k: v for k, v in given.items() if v != "<redacted>"}
        self.runner: dict[str, Any] = run.info.get("runner") or {}
        self.hardware: dict[str, Any] = run.info.get("hardware") or {}
        self.seats = int(self.limits["max_num_seqs"])
        self.budget = int(self.limits["max_num_batched_tokens"])
        self.block_size = int(self.runner.get("block_size", 16))

    @property
    def on_cpu(self) -> bool:
        """Whether the processor computes."""
        return str(self.runner.get("device", "cpu")).startswith("cpu")

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return int(self.runner.get("kv_tokens") or self.blocks * self.block_size)

    @cached_property
    def blocks(self) -> int:
        """Blocks of the KV cache."""
        return max((step["kv_blocks_used"] + step["kv_blocks_free"] for step in self.steps), default=0)

    @cached_property
    def longest(self) -> int:
        """Tokens of prompt and output of a long sequence: 19 of 20 are no longer."""
        ended = [s["stats"]["prompt_tokens"] + s["stats"]["generated_tokens"] for s in self.run.samples]
        running = [step["kv_tokens"] / step["batch_size"] for step in self.steps]  # the mean, if nothing has ended
        return max(1, int(percentile(ended, 95) or max(running, default=1)))

    @cached_property
    def fits(self) -> int:
        """How many such sequences the cache holds."""
        return max(1, min(self.kv_tokens // self.longest, self.blocks // -(-self.longest // self.block_size)))

    def bytes_of(self, tokens: int) -> int:
        """Return the memory of a KV cache of so many tokens; 0 where the runner does not tell its cache's."""
        return -(-int(self.runner.get("kv_cache_bytes") or 0) * tokens // max(1, self.kv_tokens))

    @cached_property
    def at_once(self) -> int:
        """The most sequences that ran or waited at a time."""
        return max((self.crowd(step) for step in self.steps), default=0)

    @staticmethod
    def crowd(step: Step) -> int:
        """Return how many sequences ran or waited while a step took its time."""
        return int(step["batch_size"] + step["scheduler_queue_length"])

    def time(self, steps: Iterable[Step]) -> float:
        """Return the milliseconds that these steps took of all who ran or waited."""
        return float(sum(step["step_ms"] * self.crowd(step) for step in steps))

    @cached_property
    def total(self) -> float:
        """Milliseconds of all requests."""
        return self.time(self.steps) or 1.0

    # ---- what a step costs

    @cached_property
    def decode_ms(self) -> float | None:
        """The median of steps that only decode; None where there are too few."""
        return percentile((s["step_ms"] for s in self.decodes), 50) if len(self.decodes) >= self.FEW else None

    @cached_property
    def fixed_ms(self) -> float | None:
        """What a step costs however little it does: nearly what the cheapest decode steps took."""
        return percentile((s["step_ms"] for s in self.decodes), 10) if len(self.decodes) >= self.FEW else None

    @cached_property
    def prefill_token_ms(self) -> float | None:
        """What one token of a prompt costs on top of that."""
        if self.decode_ms is None:
            return None
        costs = [(s["step_ms"] - self.decode_ms) / s["prefill_tokens"] for s in self.steps if s["prefill_tokens"]]
        cost = percentile(costs, 50)
        return cost if cost is not None and cost > 0 else None

    # ---- waiting

    @cached_property
    def waiting(self) -> dict[str, float]:
        """Milliseconds that requests waited, by what they waited for: `seats`, `budget`, `memory`, or their `turn`."""
        waited: dict[str, float] = defaultdict(float)
        for step in self.steps:
            waited[self.waits_for(step)] += step["step_ms"] * step["scheduler_queue_length"]
        return waited

    def waits_for(self, step: Step) -> str:
        """Return what kept those that waited during a step from running: the first limit that it reached."""
        if step["batch_size"] >= self.seats and not self.short_of_memory(step):
            return "seats"
        if step["prefill_tokens"] + step["decode_tokens"] >= self.budget and not step["preemptions"]:
            return "budget"
        return "memory" if step["batch_size"] < self.seats and self._tight(step) else "turn"

    def short_of_memory(self, step: Step) -> bool:
        """Whether sequences were put aside for want of blocks, not for others that were more urgent."""
        return bool(step["preemptions"]) and self._tight(step)

    def _tight(self, step: Step) -> bool:
        """Whether one more long sequence would not have fitted."""
        return bool(step["kv_blocks_free"] * self.block_size < self.longest)

    @cached_property
    def put_aside(self) -> float:
        """The share of the samples' time from being put aside until the next token."""
        lost = whole = 0.0
        for sample in self.run.samples:
            since: float | None = None
            for state, when in sample["history"]:
                if state == "preempted" and since is None:
                    since = when
                elif state in ("decode", "finished") and since is not None:
                    lost, since = lost + when - since, None
            whole += sample["history"][-1][1] - sample["history"][0][1]
        return lost / whole if whole else 0.0

    # ---- the whole

    @cached_property
    def span_ms(self) -> float:
        """From the first step's beginning to the last one's end."""
        last = self.steps[-1]
        return float((last["time"] - self.steps[0]["time"]) * 1e3 + last["step_ms"])

    @cached_property
    def between(self) -> dict[int, float]:
        """By a step's number, the milliseconds from its end to the next one's beginning, while there was work."""
        return {
            a["step"]: max(0.0, (b["time"] - a["time"]) * 1e3 - a["step_ms"])
            for a, b in pairwise(self.steps)
            if b["step"] == a["step"] + 1 and b["decode_tokens"]
        }

    def figures(self) -> str:
        """Return the run's key figures as words."""
        stats = [sample["stats"] for sample in self.run.samples]
        generated = sum(s["generated_tokens"] for s in stats)
        parts = [f"{len(self.run.requests)} request{'s' * (len(self.run.requests) != 1)}"]
        if len(self.run.outputs) < len(self.run.requests):
            parts[0] += f", of which {len(self.run.outputs)} ended"
        if self.steps and generated:
            parts.append(f"{generated:,} tokens at {generated / self.span_ms * 1e3:,.1f} a second")
        first, gaps = [s["ttft_ms"] for s in stats], [gap for s in stats for gap in s["itl_ms"]]
        for samples, what in ((first, "until the first token"), (gaps, "from token to token")):
            if (median := percentile(samples, 50)) is not None:
                high = percentile(samples, 95)
                parts.append(f"{median:,.0f} ms {what}" + (f" (p95 {high:,.0f})" if len(samples) > 1 else ""))
        return ", ".join(parts)
