"""Checkpoints of any family with random weights, written by the family's own table of names; nothing else is needed.

What they hold is what the family's description reads, so they compare backends with one another. That the names are
those of the checkpoints out there is tested against `transformers`.
"""

__all__ = ["write_checkpoint"]

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from xinfer.models.families import Family
from xinfer.models.names import Stored, Target
from xinfer.models.spec import DecoderSpec

Weights = dict[str, Tensor]

_ENCLOSING = {"h": "transformer."}  # by what the list of layers is called; others say model.
# Spellings that families read too, and the checkpoints of their tiny models do not have.
_OTHER_SPELLINGS = {"gpt_neox": ("lm_head",), "falcon": ("ln_attn", "ln_mlp")}
_WIDE = ("attn.q.", "attn.k.", "attn.q_b.", "attn.kv_a.", "embed.", "head.", "router.")


def write_checkpoint(folder: Path, config: dict[str, Any], family: Family, seed: int = 0) -> Path:
    """Write config.json and model.safetensors in Hugging Face layout, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    spec = family.spec(config)
    values = {
        name: _random(spec, name, torch.Generator().manual_seed((seed << 20) + place))
        for place, name in enumerate(spec.tensors)
    }
    save_file(_stored(spec, family, values), folder / "model.safetensors", {"format": "pt"})
    return folder


def _random(spec: DecoderSpec, name: str, generator: torch.Generator) -> Tensor:
    """Return values large enough that errors show: logits spread by 1 or more, factors of norms are not one."""
    shape, (mean, scale) = spec.tensors[name], (0.0, 0.3)
    if "norm." in name and name.endswith(".weight"):
        mean, scale = 0.0 if spec.keeps_precision(name) else 1.0, 0.2
    elif len(shape) > 1:
        scale = (1.5 if any(part in name for part in _WIDE) else 1.0) / math.sqrt(shape[-1])
    return torch.empty(shape).normal_(mean, scale, generator=generator)


def _stored(spec: DecoderSpec, family: Family, values: Weights) -> Weights:
    """Return the tensors under a checkpoint's names, laid out as it has them."""
    names = family.names
    enclosing = "gpt_neox." if family.name == "gpt_neox" else _ENCLOSING.get(names.layers, "model.")
    left, stored = dict(values), {}
    other = _OTHER_SPELLINGS.get(family.name, ())
    top, in_layer = ({place: to for place, to in t.items() if place not in other} for t in (names.top, names.layer))
    for place, tensor in _of_table(top, "", left, heads=1):
        stored[place if place.startswith(("lm_head", "embed_out")) else enclosing + place] = tensor
    for index, layer in enumerate(spec.layers):
        for place, tensor in _of_table(in_layer, f"layers.{index}.", left, layer.attention.key_heads):
            stored[f"{enclosing}{names.layers}.{index}.{place}"] = tensor
    assert not left, f"{family.name} has no names for {', '.join(left)}"
    return stored


def _of_table(table: Mapping[str, Target], prefix: str, left: Weights, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what a table has a place for, taking it from `left`.

    Of several places for one tensor that of the most parts is taken, then the last: families add to others' tables.
    """
    entries = [(place, _layout(target)) for place, target in reversed([*table.items()]) if target is not None]
    for place, layout in sorted(entries, key=lambda entry: -len(entry[1].parts)):
        for kind in ("", ".weight", ".bias"):
            names = [f"{prefix}{part}{kind}" for part in layout.parts]
            if all(name in left for name in names):
                is_matrix = names[0].endswith(".weight") and "norm" not in names[0]
                parts, axis = [left.pop(name) for name in names], -2 if is_matrix else -1
                experts = range(len(parts[0])) if "*" in place else ()
                for expert in experts:
                    own = [part[expert] for part in parts]
                    yield place.replace("*", str(expert)) + kind, _joined(layout, own, axis, heads)
                if not experts:
                    yield place + kind, _joined(layout, parts, axis, heads)


def _layout(target: Target) -> Stored:
    assert target is not None
    return target if isinstance(target, Stored) else Stored((target,))


def _joined(layout: Stored, parts: Sequence[Tensor], axis: int, heads: int) -> Tensor:
    """Undo `Stored.take`; `axis` has the rows, counted from the end."""
    place, rows = parts[0].ndim + axis, [part.shape[axis] for part in parts]
    groups = {"": 1, "heads": heads, "rows": math.gcd(*rows)}[layout.interleaved]
    apart = [part.reshape(*part.shape[:place], groups, -1, *part.shape[place + 1 :]) for part in parts]
    whole = torch.cat(apart, place + 1).flatten(place, place + 1)
    return (whole.transpose(-1, -2) if layout.transposed and axis == -2 else whole).contiguous()
