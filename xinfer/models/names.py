"""From the names and layouts of checkpoints to the canonical ones of `DecoderSpec.tensors`, as tables.

A table's key is where a tensor lies in a layer (or at the top), its last part (`weight`, `bias`) left off where both go
the same way; `*` is an expert's number. Its value is the canonical place, None for what inference does not need, or a
`Stored` where the checkpoint lays it out in another way.
"""

__all__ = ["CANONICAL", "Found", "Names", "Stored", "Target"]

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Shape = tuple[int, ...]

# What encloses a decoder, also the text part of a larger model.
_ENCLOSING = ("model.", "language_model.", "text_model.", "transformer.", "gpt_neox.", "backbone.")
_OTHER_PARTS = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "mm_projector",
    "connector",
    "audio_tower",
    "patch_merger",
    "vision_embed_tokens",
    "image_newline",
)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint lays out one canonical tensor or several.

    Attributes:
        parts: canonical places of what it holds, in order of their rows.
        transposed: whether matrices are [in, out].
        interleaved: `""` if all rows of one part come before those of the next; `heads` if each key head comes with
            its queries, its keys and its values; `rows` if single rows take turns.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: str = ""

    def shape(self, parts: Sequence[Shape], axis: int) -> Shape:
        """Return the shape of the stored tensor, from those of its parts; `axis` has the rows, from the end."""
        rows = sum(shape[axis] for shape in parts)
        whole = [*parts[0]]
        whole[axis] = rows
        if self.transposed and axis == -2:
            whole[-2:] = whole[:-3:-1]
        return tuple(whole)

    def take(self, stored: Tensor, parts: Sequence[Shape], index: int, axis: int, heads: int) -> Tensor:
        """Return one part: a view where it lies in one piece."""
        if self.transposed and axis == -2:
            stored = stored.transpose(-1, -2)
        if len(parts) == 1:
            return stored
        groups = {"": 1, "heads": heads, "rows": math.gcd(*(shape[axis] for shape in parts))}[self.interleaved]
        counts = [shape[axis] // groups for shape in parts]
        place = stored.ndim + axis
        grouped = stored.reshape(*stored.shape[:place], groups, sum(counts), *stored.shape[place + 1 :])
        return grouped.narrow(place + 1, sum(counts[:index]), counts[index]).flatten(place, place + 1)


Target = str | Stored | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a checkpoint's tensor is: canonical names in `stored.parts`; one expert's slice of them, or whole."""

    stored: Stored
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """The tables of one family.

    Attributes:
        top: what is no layer's.
        layer: within a layer.
        layers: what the list of layers is called.
    """

    top: Mapping[str, Target]
    layer: Mapping[str, Target]
    layers: str = "layers"
    _pattern: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        pattern = re.compile(rf"{re.escape(self.layers)}\.(\d{{1,6}})\.(.+)")
        object.__setattr__(self, "_pattern", pattern)

    def find(self, name: str) -> Found | None:
        """Return what a tensor is, None if nothing needs it; one that no table has keeps its name."""
        plain = name
        while any(plain.startswith(prefix) for prefix in _ENCLOSING):
            plain = plain.partition(".")[2]
        if self.other_part(name) is not None:
            return None
        match = self._pattern.fullmatch(plain)
        table, place = (self.layer, match[2]) if match else (self.top, plain)
        prefix = f"layers.{match[1]}." if match else ""
        numbers = re.findall(r"\.(\d{1,6})\.", place)
        starred = re.sub(r"\.\d{1,6}\.", ".*.", place)
        for path, _, kind in ((starred, "", ""), starred.rpartition(".")):
            if path in table:
                target = table[path]
                if target is None:
                    return None
                stored = target if isinstance(target, Stored) else Stored((target,))
                ending = f".{kind}" if kind else ""
                parts = tuple(f"{prefix}{part}{ending}" for part in stored.parts)
                expert = int(numbers[-1]) if "*" in path else None
                return Found(Stored(parts, stored.transposed, stored.interleaved), expert)
        return Found(Stored((name,)))

    def other_part(self, name: str) -> str | None:
        """Return which part a tensor is of that a model has besides its text part, if it is of one."""
        while any(name.startswith(prefix) for prefix in _ENCLOSING):
            name = name.partition(".")[2]
        part = name.partition(".")[0]
        return part if part in _OTHER_PARTS else None


CANONICAL = Names({}, {})  # of tensors that have their canonical names
