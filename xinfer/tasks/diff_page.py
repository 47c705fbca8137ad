"""The page of a comparison: its figures, where the sides part, and their layers, in pictures."""

__all__ = ["layer_name", "write_diff_page"]

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.records.page import number, write_page
from xinfer.session import Session
from xinfer.tasks.diff_rows import Layers, Measured, Place
from xinfer.tasks.diff_sides import Side, Text

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 56, 26
_WORST, _SHOWN, _BEFORE = 12, 3, 10  # places in the table, tokens of each side there, tokens before it
_MOST_DOTS = 3000


@dataclass(frozen=True, slots=True)
class Dot:
    """A value in the picture's coordinates."""

    x: float
    y: float
    label: str
    marked: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """Values over their number, on a logarithmic scale; marks are (place in the picture, text)."""

    dots: list[Dot]
    x_marks: list[tuple[float, str]]
    y_marks: list[tuple[float, str]]
    bound: tuple[float, str] | None = None
    line: bool = False
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    bottom: int = _BOTTOM


def write_diff_page(
    target: Path, sides: Sequence[Side], texts: Sequence[Text], found: Measured, verdict: str, failures: Sequence[str]
) -> None:
    """Write the page."""
    session, names = sides[0].session, [side.name for side in sides]
    worst = sorted(found.places, key=lambda place: -max(place.kl, place.kl_reverse))[:_WORST]
    write_page(
        target,
        "diff.html.j2",
        names=names,
        verdict=verdict,
        failures=failures,
        figures=found.figures(),
        places=_picture_of_places(found.places, texts),
        layers=None if found.layers is None else _picture_of_layers(found.layers),
        worst=[_row(session, texts, place) for place in worst],
        facts=_facts(sides, texts, found),
    )


def _picture_of_places(places: Sequence[Place], texts: Sequence[Text]) -> Picture:
    step = -(-len(places) // _MOST_DOTS)
    kept = [(i, p) for i, p in enumerate(places) if i % step == 0 or p.chosen[0] != p.chosen[1]]
    scale = _Scale([place.kl for _, place in kept], len(places))
    dots = [
        Dot(scale.x(i), scale.y(p.kl), f"{texts[p.text].name}, token {p.at}: {p.kl:.3g}", len(set(p.chosen)) > 1)
        for i, p in kept
    ]
    return Picture(dots, scale.x_marks(), scale.y_marks())


def _picture_of_layers(layers: Layers) -> Picture:
    scale = _Scale([*layers.apart, layers.rounding], len(layers.apart))
    dots = [
        Dot(scale.x(i), scale.y(each), f"{layer_name(i)}: {each:.3g}", i == layers.wrong)
        for i, each in enumerate(layers.apart)
    ]
    bound = (scale.y(layers.rounding), f"{layers.rounding:g}: what may be where nothing is wrong")
    return Picture(dots, scale.x_marks(), scale.y_marks(), bound, line=True)


def layer_name(index: int) -> str:
    """Return what an entry of `Layers.apart` is of."""
    return "the embedding" if index == 0 else f"layer {index - 1}"


class _Scale:
    """Places values [N] in a picture: by their number, and by the logarithm of what they are."""

    def __init__(self, values: Sequence[float], count: int) -> None:
        some = [math.log10(each) for each in values if each > 0] or [-6.0]
        self._low, self._high = math.floor(max(min(some), max(some) - 8)), math.ceil(max(some) + 1e-9)
        self._high = max(self._high, self._low + 1)
        self._count = count

    def x(self, place: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * place / max(self._count - 1, 1), 1)

    def y(self, value: float) -> float:
        height = math.log10(value) if value > 0 else self._low
        share = (min(max(height, self._low), self._high) - self._low) / (self._high - self._low)
        return round((_HEIGHT - _BOTTOM) * (1 - share), 1)

    def x_marks(self) -> list[tuple[float, str]]:
        """Return round numbers, about eight of them."""
        step = next(s for s in (f * 10**e for e in range(9) for f in (1, 2, 5)) if self._count <= 8 * s)
        return [(self.x(place), str(place)) for place in range(0, self._count, step)]

    def y_marks(self) -> list[tuple[float, str]]:
        step = max(1, -(-(self._high - self._low) // 6))
        return [(self.y(10.0**e), f"{10.0**e:g}") for e in range(self._low, self._high + 1, step)]


def _row(session: Session, texts: Sequence[Text], place: Place) -> dict[str, Any]:
    text = texts[place.text]
    before = text.token_ids[max(0, place.at + 1 - _BEFORE) : place.at + 1]
    return {
        "where": f"{text.name}, {place.at}",
        "before": session.tokenizer.decode(list(before), False),
        "token": "" if place.token_id is None else session.token_text(place.token_id),
        "kl": max(place.kl, place.kl_reverse),
        "tops": [[(session.token_text(token), share) for token, share in top[:_SHOWN]] for top in place.top],
    }


def _facts(sides: Sequence[Side], texts: Sequence[Text], found: Measured) -> list[tuple[str, str]]:
    tokens = sum(len(text.token_ids) for text in texts)
    facts = [("texts", f"{len(texts)} of {tokens:,} tokens in all, {len(found.places):,} places")]
    for letter, side in zip("ab", sides, strict=True):
        info, model = side.session.runner.info, side.session.config.model
        facts.append(
            (letter, f"{side.name}: {model.reference}, {side.precision}, computed in {info.dtype} on {info.device}")
        )
    if (layers := found.layers) is not None:
        grown = layers.apart[layers.steepest] / max(layers.apart[layers.steepest - 1], 1e-9)
        facts.append(("steepest", f"{layer_name(layers.steepest)}, {number(grown)} times what came before it"))
    return facts
