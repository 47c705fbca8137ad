"""What a benchmark has the engine do: llama-bench's shapes, read and checked."""

__all__ = ["Work", "plan"]

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xinfer.engine.engine import Engine
from xinfer.errors import ConfigError
from xinfer.task_configs import BenchConfig

_SHAPE = re.compile(r"pp(?P<prompt>\d+)(\+tg(?P<both>\d+))?|tg(?P<decode>\d+)(@(?P<context>\d+))?")
_MOST = 1_000_000  # tokens, far more than any context


@dataclass(frozen=True, slots=True)
class Work:
    """So many sequences that come together.

    Attributes:
        shape: `ppN`, N tokens of prompt until the first token; `tgN`, N tokens one by one after a prompt of one token,
            or of C (`tgN@C`), and after the first token, which comes from the prompt; `ppN+tgM`, N tokens of prompt
            and M generated.
        batch: sequences.
        prompt_tokens, new_tokens: of each.
    """

    shape: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, shape: str, batch: int) -> "Work":
        """Return what a shape stands for; another word or number is a `ConfigError`."""
        match = _SHAPE.fullmatch(shape)
        if match is None:
            raise ConfigError(f"bench.tests: {shape!r} is unknown: expected are ppN, tgN, tgN@CONTEXT or ppN+tgM")
        counts = {name: int(found[:9]) for name, found in match.groupdict().items() if found is not None}
        if not all(0 < count <= _MOST for count in counts.values()):
            raise ConfigError(f"bench.tests: {shape!r} is out of range: from 1 to {_MOST:,} tokens are expected")
        if "decode" in counts:
            return cls(shape, batch, counts.get("context", 1), counts["decode"] + 1)
        return cls(shape, batch, counts["prompt"], counts.get("both", 1))

    def check(self, engine: Engine) -> None:
        """Refuse what the engine could not run all at once, for then something else would be measured."""
        limits, info = engine.scheduler.limits, engine.runner.info
        length, together = self.prompt_tokens + self.new_tokens, self.batch * self.prompt_tokens
        blocks = self.batch * -(-length // info.block_size)
        if self.batch > limits.max_num_seqs:
            raise ConfigError(
                f"bench.batch={self.batch} is more than engine.max_num_seqs={limits.max_num_seqs}: raise that"
            )
        if length > engine.max_model_len:
            raise ConfigError(
                f"{self.shape} takes sequences of {length} tokens, but {engine.max_model_len} is the longest that can "
                "run: measure less, or raise engine.max_model_len or engine.kv_memory"
            )
        if blocks > info.num_blocks or self.batch * length > info.kv_tokens:
            raise ConfigError(
                f"{self.shape} with bench.batch={self.batch} takes {self.batch * length} tokens of KV cache, which "
                f"holds {info.kv_tokens}: measure less, or raise engine.kv_memory"
            )
        if self.shape.startswith("tg") and together > limits.max_num_batched_tokens:
            raise ConfigError(
                f"{self.shape} with bench.batch={self.batch} has prompts of {together} tokens, and some would generate "
                f"while others are computed: raise engine.max_num_batched_tokens={limits.max_num_batched_tokens}"
            )


def plan(config: BenchConfig) -> list[Work]:
    """Return what is asked for: each shape with each number of sequences; what makes no sense is a `ConfigError`."""
    shapes, batches = _list(config.tests), _list(config.batch)
    for name, value, least in (("repeats", config.repeats, 1), ("warmup", config.warmup, 0)):
        if value < least:
            raise ConfigError(f"bench.{name}={value} is out of range: at least {least} is expected")
    if bad := [batch for batch in batches if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1]:
        raise ConfigError(f"bench.batch={bad[0]!r} is out of range: a whole number from 1 on is expected")
    works = [Work.parse(str(shape), batch) for shape in shapes for batch in batches]
    if not works or len(set(works)) < len(works):
        raise ConfigError(f"bench.tests={shapes} with bench.batch={batches} names nothing, or one thing twice")
    return works


def _list(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
