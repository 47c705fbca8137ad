"""HTML pages of records: one file each that needs nothing else, replaced whole."""

__all__ = ["ceiling", "number", "write_page"]

import json
import os
from pathlib import Path
from typing import Any

import jinja2

from xinfer.hardware import gibibytes


def write_page(target: Path, template: str, **content: Any) -> Path:
    """Write a page from a template beside this file, and return its path."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("xinfer.records", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "bytes": gibibytes, "pretty": lambda value: json.dumps(value, indent=2)}
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(environment.get_template(template).render(**content), "utf-8")
    os.replace(temporary, target)
    return target


def ceiling(value: float) -> float:
    """Return the next round number: 1, 2, 4, 6, 8 or 10 times a power of ten."""
    scale = 1.0
    while scale * 10 < value:
        scale *= 10
    while scale > value:
        scale /= 10
    return next((scale * step for step in (1, 2, 4, 6, 8, 10) if scale * step >= value), scale * 10) or 1.0


def number(value: float | None) -> str:
    """Return a number as people read it."""
    if value is None:
        return "–"
    return (
        f"{value:,.0f}"
        if abs(value) >= 100 or value == int(value)
        else f"{value:.1f}"
        if abs(value) >= 1
        else f"{value:.3g}"
    )
