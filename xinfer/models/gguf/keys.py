"""What a GGUF file says of its architecture: keys checked as they are read, those that nobody read refused."""

__all__ = ["Keys"]

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError

# What changes nothing, or is read under another name by those whom it concerns.
_HARMLESS = {
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}


class Keys:
    """The keys of one architecture, without its name, and the names of the file's tensors.

    A value may be given once or for each layer; where layers differ it is a `ModelError`, as everything is that can't
    be understood. `check_all_read` refuses keys that nobody asked for, unless they are off (0, false) or harmless.
    """

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Set[str]) -> None:
        self.path, self.architecture, self.tensors = path, architecture, tensors
        prefix = f"{architecture}."
        self._values = {name.removeprefix(prefix): v for name, v in metadata.items() if name.startswith(prefix)}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; one that is missing and has no default is an error."""
        self._read.add(name)
        value = self._values.get(name, default)
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise ModelError(f"{self.path}: {self.architecture}.{name} differs between layers, not supported")
            value = value[0]
        if value is None:
            raise ModelError(f"{self.path}: the metadata lacks {self.architecture}.{name}")
        return value

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` on."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"{self.path}: {self.architecture}.{name}={value!r}, but a whole number above {least - 1} is expected"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.path}: {self.architecture}.{name}={value!r}, but a number is expected")
        return value

    def listed(self, name: str) -> list[Any] | None:
        """Return a list, one value for each layer, or None where there is no list."""
        value = self._values.get(name)
        if isinstance(value, list):
            self._read.add(name)
        return value if isinstance(value, list) else None

    def demand(self, name: str, *accepted: Any, why: str = "") -> None:
        """Refuse a value that is none of those accepted; it may be missing."""
        if name in self and self.get(name) not in accepted:
            listed = " or ".join(map(repr, accepted))
            raise ModelError(
                f"{self.path}: {self.architecture}.{name}={self.get(name)!r} is not supported (supported: {listed})"
                + why
            )

    def check_all_read(self) -> None:
        """Refuse what nobody asked for: it might change what the model computes."""
        left = [n for n, value in self._values.items() if n not in self._read | _HARMLESS and _says_something(value)]
        if left:
            names = ", ".join(f"{self.architecture}.{name}={self._values[name]!r:.40}" for name in left[:5])
            raise ModelError(f"{self.path}: not understood, so the model can't be computed as it was meant: {names}")


def _says_something(value: Any) -> bool:
    return any(value) if isinstance(value, list) else bool(value)
