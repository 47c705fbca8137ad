"""Which of several choices no other one beats, and a picture of them."""

__all__ = ["Dot", "Scatter", "pareto", "scatter"]

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xinfer.records.page import ceiling, number

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 300, 64, 40
_MARGIN = 0.08  # of an axis beyond the outermost points


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of those points which no other one beats, less being better, in ascending order.

    One point beats another if it is as good in both numbers and better in one; equal points do not beat each other.
    Sorted by the first number, a point is beaten exactly if one before it is as good in the second and the two are not
    equal: O(n log n).
    """
    best, left = math.inf, []
    before: tuple[float, float] | None = None
    for place in sorted(range(len(points)), key=lambda i: points[i]):
        if points[place][1] < best or points[place] == before:
            left.append(place)
            best, before = points[place][1], points[place]
    return sorted(left)


@dataclass(frozen=True, slots=True)
class Dot:
    """A point in the picture's coordinates."""

    x: float
    y: float
    label: str
    title: str
    unbeaten: bool


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points with their axes: marks are (place in the picture, text); `front` is a line through the unbeaten points."""

    dots: list[Dot]
    front: str
    x_name: str
    y_name: str
    x_marks: list[tuple[float, str]]
    y_marks: list[tuple[float, str]]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    bottom: int = _BOTTOM


def scatter(
    points: Sequence[tuple[float, float, str, str]], x_name: str, y_name: str, unit: float = 1.0
) -> Scatter | None:
    """Draw points (x, less being better; y, more being better; label; title), x in units; None for less than two."""
    if len(points) < 2:
        return None
    unbeaten = pareto([(x, -y) for x, y, _, _ in points])
    xs, ys = [x / unit for x, _, _, _ in points], [y for _, y, _, _ in points]
    (left, right), (low, high) = _range(xs), _range(ys)

    def across(x: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * (x - left) / (right - left), 1)

    def down(y: float) -> float:
        return round((_HEIGHT - _BOTTOM) * (high - y) / (high - low), 1)

    dots = [
        Dot(across(x), down(y), label, title, place in unbeaten)
        for place, (x, y, (_, _, label, title)) in enumerate(zip(xs, ys, points, strict=True))
    ]
    front = sorted((dot for dot in dots if dot.unbeaten), key=lambda dot: (dot.x, -dot.y))
    return Scatter(
        dots,
        " ".join(f"{dot.x},{dot.y}" for dot in front),
        x_name,
        y_name,
        [(across(x), number(x)) for x in _marks(left, right)],
        [(down(y), number(y)) for y in _marks(low, high)],
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low) or abs(high) * _MARGIN or 1.0
    return low - margin, high + margin


def _marks(low: float, high: float) -> list[float]:
    """Return round numbers between two others, about five."""
    step = ceiling((high - low) / 6)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
