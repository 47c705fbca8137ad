"""By how much logits differ where a model is computed in another precision, or by other kernels."""

__all__ = ["FLIPS", "NOISE", "coarsest", "noise_of", "precision_of", "spread"]

from collections.abc import Iterable

from torch import Tensor

from xinfer.errors import ConfigError
from xinfer.session import Session

# Half of what separates the differences of a row's likely tokens (those of at least a thousandth) from each other, in
# standard deviations of the row: the 99th percentile over 1,024 places of the shipped text, SmolLM2 against itself in
# float32 on backend=eager, the larger of eager's and onnx's where both compute it (float32: onnx and compile; float16
# 0.008, bfloat16 0.072, int8 0.061 and 0.112, int4 0.52 and 0.46, of a cache alone int8 0.080 and fp8 0.170, by
# experiments/kv_cache.py; two Zen 5 cores, 2026-11-30).
NOISE = {"float32": 3e-5, "float16": 0.01, "bfloat16": 0.08, "int8": 0.12, "fp8": 0.18, "int4": 0.55}
# The margin, in the same measure, below which lie 95 % of the tokens that another precision does not give again: less,
# because differences of many logits at once cancel out in what is drawn (`experiments/why_survival.py`).
FLIPS = {"float32": 3e-5, "float16": 0.004, "bfloat16": 0.015, "int8": 0.021, "fp8": 0.024, "int4": 0.13}
_RARE = 4.0  # times that, differences are not found by chance: of 1,024 places none was above 3


def precision_of(session: Session) -> str:
    """Return in which precision a session computes; see `coarsest`."""
    info = session.runner.info
    return coarsest(session.config.model.quantization, info.dtype, info.notes)


def coarsest(quantization: str | None, dtype: str, notes: Iterable[str]) -> str:
    """Return the coarsest precision of weights, activations and cache, of which a runner's `notes` tell."""
    kept = [kind for kind in ("int8", "fp8") if any(f"KV cache is {kind}" in note for note in notes)]
    return max(filter(None, [quantization, dtype, *kept]), key=lambda kind: NOISE.get(kind, 0.0))


def noise_of(row: Tensor, *precisions: str, rare: bool = False) -> float:
    """Return by how much logits of a row [V] may differ between these precisions; with `rare`, if anything is right."""
    for precision in precisions:
        if precision not in NOISE:
            raise ConfigError(f"of precision {precision!r} no noise is known (there are: {', '.join(NOISE)})")
    largest = max((NOISE[precision] for precision in precisions), default=0.0)
    return largest * (_RARE if rare else 1.0) * spread(row)


def spread(row: Tensor) -> float:
    """Return the standard deviation of a row of logits [V], of those that are not masked."""
    return float(row[row.isfinite()].double().std())
