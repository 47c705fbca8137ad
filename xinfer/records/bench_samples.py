"""What a benchmark measured, sample by sample: as it is kept in bench.json, and read back as a baseline."""

__all__ = ["Measured", "Repeat", "RequestSample", "Side", "read_sides", "repeat_from", "write_sides"]

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xinfer.engine.outputs import RequestOutput
from xinfer.engine.types import FinishReason
from xinfer.errors import UsageError
from xinfer.records.record import write_json

SCHEMA = 1
_LARGEST = 256 << 20  # bytes of a file that is read


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request's latencies (milliseconds), as the engine counted its tokens.

    Attributes:
        ttft_ms: until the first token; None if there was none.
        itl_ms: from each token to the next: one less than there are tokens, whatever steps they came in.
        error: why it failed; its latencies then count for nothing.
    """

    input_tokens: int
    output_tokens: int
    ttft_ms: float | None
    itl_ms: tuple[float, ...]
    e2e_ms: float
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> "RequestSample":
        """Return what is kept of a result."""
        stats, done = output.stats, output.finish_reason is FinishReason.LENGTH
        return cls(
            input_tokens=stats.prompt_tokens,
            output_tokens=stats.generated_tokens,
            ttft_ms=stats.ttft_ms,
            itl_ms=stats.itl_ms,
            e2e_ms=stats.e2e_ms,
            error=None if done else output.error or f"it ended early ({output.finish_reason})",
        )

    @property
    def tpot_ms(self) -> float | None:
        """The mean time of a token after the first."""
        return sum(self.itl_ms) / len(self.itl_ms) if self.itl_ms else None


@dataclass(frozen=True, slots=True)
class Repeat:
    """One batch of requests that came together.

    Attributes:
        requests: in their order.
        duration_ms: until the last of them had ended.
        cached_tokens: of their prompts, found in the prefix cache; a benchmark wants none.
        roofline: share of what memory allows that the steps which only decoded reached; None where it is not known.
        energy_j: of the device, everything that runs on it included; None where it does not tell.
        peak_memory_bytes: the most that the process has held up to now; None where two sides share it.
    """

    requests: tuple[RequestSample, ...]
    duration_ms: float
    cached_tokens: int = 0
    roofline: float | None = None
    energy_j: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def completed(self) -> list[RequestSample]:
        """Those that did not fail."""
        return [request for request in self.requests if request.error is None]


@dataclass(slots=True)
class Measured:
    """All repeats of one shape of work (`pp512`) with one number of sequences."""

    shape: str
    batch: int
    repeats: list[Repeat]

    @property
    def name(self) -> str:
        """As in tables and messages."""
        return f"{self.shape} batch {self.batch}"


@dataclass(slots=True)
class Side:
    """What was measured, and everything of it that has to be alike for two of them to be compared.

    Attributes:
        facts: of hardware, model, backend, engine and versions, by dotted name.
        build: version, commit, and whether the code differed from it; what two sides may differ in.
        resources: what weights and cache take, and what one token costs beside computing: see `bench_run`.
    """

    facts: dict[str, Any]
    build: dict[str, Any]
    resources: dict[str, Any]
    measured: list[Measured]

    @property
    def label(self) -> str:
        """Backend, precision and commit in short."""
        kind = self.facts.get("model.quantization") or self.facts.get("model.dtype")
        return f"{self.facts.get('backend.name')} {kind} ({commit(self.build)})"


def commit(build: Mapping[str, Any]) -> str:
    """Return a build's commit in short, with a + if the code differed from it; without one its version."""
    if found := build.get("commit"):
        return str(found)[:9] + ("+" if build.get("dirty") else "")
    return str(build.get("version", "unknown"))


def write_sides(path: Path, sides: Sequence[Side], **more: Any) -> None:
    """Write what was measured, as a whole or not at all; the first side is the one that a baseline is taken from."""
    today = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(path, {"schema": SCHEMA, "date": today, "sides": [asdict(side) for side in sides], **more})


def read_sides(path: Path) -> list[Side]:
    """Read a file back; one that is damaged, not finite, or something else is a `UsageError`."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST >> 20} MiB")
        content = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}, not {SCHEMA}")
        sides = [_side(side) for side in content["sides"]]
        if not sides:
            raise ValueError("nothing was measured")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UsageError(f"{path} holds no benchmark ({reason}): name a file of bench.save_baseline, or a run's "
                         "bench.json") from error  # fmt: skip
    return sides


def _side(entry: Mapping[str, Any]) -> Side:
    measured = [
        Measured(str(m["shape"]), int(m["batch"]), [repeat_from(r) for r in m["repeats"]]) for m in entry["measured"]
    ]
    return Side(dict(entry["facts"]), dict(entry["build"]), dict(entry["resources"]), measured)


def repeat_from(entry: Mapping[str, Any]) -> Repeat:
    """Return a repeat from its JSON; where it is none, a `KeyError`, `TypeError` or `ValueError` is raised."""
    peak = entry["peak_memory_bytes"]
    return Repeat(
        requests=tuple(_request(request) for request in entry["requests"]),
        duration_ms=_time(entry["duration_ms"]),
        cached_tokens=int(entry["cached_tokens"]),
        roofline=None if entry["roofline"] is None else _time(entry["roofline"]),
        energy_j=None if entry["energy_j"] is None else _time(entry["energy_j"]),
        peak_memory_bytes=None if peak is None else int(peak),
    )


def _request(entry: Mapping[str, Any]) -> RequestSample:
    return RequestSample(
        input_tokens=int(entry["input_tokens"]),
        output_tokens=int(entry["output_tokens"]),
        ttft_ms=None if entry["ttft_ms"] is None else _time(entry["ttft_ms"]),
        itl_ms=tuple(_time(gap) for gap in entry["itl_ms"]),
        e2e_ms=_time(entry["e2e_ms"]),
        error=None if entry["error"] is None else str(entry["error"]),
    )


def _time(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r} is no time")
    return number


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")
