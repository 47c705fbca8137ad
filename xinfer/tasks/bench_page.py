"""What a benchmark prints: rows of Markdown that say what they rest on, and what a comparison came to."""

__all__ = ["comparison_lines", "table"]

from collections.abc import Sequence
from typing import Any

from xinfer.hardware import gibibytes
from xinfer.records.bench_gate import Comparison, Gate
from xinfer.records.bench_samples import Side, commit
from xinfer.records.bench_summary import summary

_COLUMNS = (
    *("hardware", "model", "backend", "dtype", "threads", "test", "batch", "tokens/s", "TTFT ms p50"),
    *("TPOT ms", "ITL ms p50", "p95", "p99", "roofline", "peak memory", "n", "xinfer"),
)


def table(sides: Sequence[Side]) -> str:
    """Return everything that was measured as a Markdown table, each row whole by itself."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *(row for side in sides for row in _rows(side))]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def _rows(side: Side) -> list[list[str]]:
    facts = side.facts
    hardware = ", ".join(gpu["name"] for gpu in facts["hardware.gpus"]) if _on_gpu(facts) else facts["hardware.cpu"]
    quantization = facts["model.quantization"]
    dtype = f"{quantization}, {facts['model.dtype']}" if quantization else facts["model.dtype"]
    rows = []
    for measured in side.measured:
        figures = summary(measured)
        rows.append(
            [
                *(str(hardware), str(facts["model.name"]), str(facts["backend.name"]), str(dtype)),
                *(str(facts["hardware.threads"] or "-"), measured.shape, str(measured.batch), _rate(figures)),
                *(_number(figures[name]) for name in ("median_ttft_ms", "mean_tpot_ms", "median_itl_ms")),
                *(_number(figures[name]) for name in ("p95_itl_ms", "p99_itl_ms")),
                "-" if figures["roofline"] is None else f"{figures['roofline']:.0%}",
                "-" if figures["peak_memory_bytes"] is None else gibibytes(figures["peak_memory_bytes"]),
                str(figures["repeats"]),
                commit(side.build),
            ]
        )
    return rows


def _on_gpu(facts: dict[str, Any]) -> bool:
    return bool(facts["hardware.gpus"]) and not str(facts["hardware.device"]).startswith("cpu")


def _rate(figures: dict[str, Any]) -> str:
    mean, deviation = figures["mean_tok_s"], figures["std_tok_s"]
    return "no data" if mean is None else f"{mean:.1f} ± {deviation:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def comparison_lines(new: Side, old: Side, gate: Gate) -> list[str]:
    """Return a line for what is compared, one for each statistic, and one for memory that grew."""
    shares = [{m.name: summary(m)["roofline"] for m in side.measured} for side in (new, old)]
    lines = [f"{new.label} against {old.label}; times, medians over repeats, with {_confidence(gate)} of their ratio"]
    for found in gate.comparisons:
        roofs = [share.get(found.name) for share in shares]
        roofline = "" if None in roofs else f", roofline {roofs[0]:.0%} and {roofs[1]:.0%}"
        lines.append(f"{_line(found)}{roofline}")
    lines += [f"{name}: nothing to compare, all requests of one side failed: inconclusive" for name in gate.missing]
    for name, (now, before) in gate.grown.items():
        why = f"because: {gate.reason}" if gate.reason else 'say why with bench.reason="..."'
        lines.append(f"{name} grew from {gibibytes(before)} to {gibibytes(now)}, more than a tenth: {why}")
    return lines


def _confidence(gate: Gate) -> str:
    return f"{gate.comparisons[0].ratio.confidence:.0%} intervals" if gate.comparisons else "intervals"


def _line(found: Comparison) -> str:
    ratio = found.ratio
    ends = "" if ratio.low is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    verdict = "" if found.verdict == "told" else f" {found.verdict}"
    name = f"{found.latency.upper()} {ratio.statistic}"
    return (
        f"{found.name}: {name} {ratio.new:.2f} and {ratio.old:.2f} ms, ratio {ratio.estimate:.3f}{ends}"
        f" of {ratio.repeats} repeats{verdict}"
    )
