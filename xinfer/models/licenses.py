"""The licence of a model: what its files say of it, in their own words."""

__all__ = ["folder_license", "gguf_license"]

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILES = re.compile(r"(licen[cs]e|copying)([.-].*)?", re.IGNORECASE)
_LONGEST = 1 << 16  # characters of README.md that are looked at: the block is at its top


def gguf_license(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (licence, `general.license`) as a GGUF file's metadata has it; of one called other, its name."""
    key = "general.license.name" if metadata.get("general.license") in (None, "other") else "general.license"
    key = key if metadata.get(key) else "general.license"
    value = metadata.get(key)
    return (_line(value), key) if isinstance(value, str) and value.strip() else None


def folder_license(folder: Path) -> tuple[str, str] | None:
    """Return (licence, file) of a model's folder: of the YAML at the top of README.md, else of a file named LICENSE.

    Of the former, `license` counts, and where that is `other`, `license_name`. Of the latter it is the first line.
    """
    fields = _front_matter(_read(folder / "README.md"))
    name = fields.get("license", "")
    if name in ("", "other", "unknown"):
        name = fields.get("license_name", "") or name
    if name:
        return name, "README.md"
    for path in sorted(folder.glob("*")):
        if _FILES.fullmatch(path.name) and path.is_file():
            lines = (line.strip(" #*=-") for line in _read(path).splitlines())
            return next((_line(line) for line in lines if line), "a text of its own"), path.name
    return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_LONGEST)
    except OSError:
        return ""


def _front_matter(text: str) -> dict[str, str]:
    """Return the fields of the block between two lines of `---` that are a word, or a list of words (joined).

    Not by a YAML parser: a stranger's README needs none of what that could do.
    """
    block = re.match(r"\s*---[ \t]*\n(.*?\n)---[ \t]*(\n|$)", text, re.DOTALL)
    fields = {}
    for name, value, items in re.findall(
        r"^(\w+):[ \t]*(.*)\n((?:[ \t]*- .*\n)*)", block[1] if block else "", re.MULTILINE
    ):
        words = re.findall(r"-[ \t]+(.*)", items) if not value.strip() else value.strip().strip("[]").split(",")
        fields[name] = ", ".join(filter(None, (_word(word) for word in words)))
    return fields


def _word(text: str) -> str:
    return _line(re.sub(r"(^|\s)#.*", "", text).strip().strip("\"'"))


def _line(text: str) -> str:
    """Return one line without control characters, and no longer than a name: it is shown on a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:120]
