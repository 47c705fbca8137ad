"""HTML pages of a run's folder: one file each that needs nothing else, light or dark as the reader has it."""

__all__ = ["number", "write_page"]

import json
import os
from pathlib import Path
from typing import Any

import jinja2

from xinfer.hardware import gibibytes


def write_page(target: Path, template: str, **values: Any) -> Path:
    """Write a page from a template of this folder, whole or not at all, and return its path."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("xinfer.records", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "bytes": gibibytes, "pretty": lambda value: json.dumps(value, indent=2)}
    page = environment.get_template(template).render(**values)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(page, "utf-8")
    os.replace(temporary, target)
    return target


def number(value: float | None) -> str:
    """Return a number as pages show it, with as many digits as tell something."""
    if value is None:
        return "–"
    return (
        f"{value:,.0f}"
        if abs(value) >= 100 or value == int(value)
        else f"{value:.1f}"
        if abs(value) >= 1
        else f"{value:.3g}"
    )
