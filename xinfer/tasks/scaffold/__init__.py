"""A package with a backend that works, to begin one's own with."""

__all__ = ["files", "write_plugin"]

import keyword
import re
from collections.abc import Container
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from xinfer.errors import ConfigError, PluginError
from xinfer.flags import quote

_TEMPLATE = Path(__file__).parent / "template"


def files(name: str) -> dict[str, str]:
    """Return the texts of the package `xinfer-NAME` by their paths in its folder."""
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATE),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=select_autoescape(),  # of HTML, of which there is none
    )
    places = {
        "pyproject.toml": "pyproject.toml.j2",
        f"xinfer_{name}/__init__.py": "backend.py.j2",
        f"tests/test_{name}.py": "test_backend.py.j2",
        "README.md": "README.md.j2",
    }
    title = "".join(part.capitalize() for part in name.split("_"))
    return {place: templates.get_template(file).render(name=name, title=title) for place, file in places.items()}


def write_plugin(name: str | None, taken: Container[str], where: Path) -> Path:
    """Write the package into a new folder `xinfer-NAME` and return it; a name that can't be one is a `UsageError`.

    Args:
        name: of the backend, and so of a module.
        taken: names that others have.
        where: the folder in which the new one is made.
    """
    if name is None:
        raise ConfigError("plugins new needs a name: python -m xinfer plugins new NAME")
    means_something = keyword.iskeyword(name) or quote(name) != name or name == "null"
    if means_something or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise ConfigError(
            f"plugins.name={name!r} can't be the name of a backend: take small letters, digits and _, 40 at most, that "
            "begin with a letter and mean nothing to Python or Hydra, such as my_kernel"
        )
    if name in taken or find_spec(f"xinfer_{name}") is not None:
        raise PluginError(
            f"plugins.name={name!r} is the name of a backend or plugin that is there already: take another"
        )
    folder = where / f"xinfer-{name}"
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(f"{folder} is there already: remove it, or take another name") from None
    for place, text in files(name).items():
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text, "utf-8")
    return folder
