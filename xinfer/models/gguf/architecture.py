"""What it takes to translate one of GGUF's architectures."""

__all__ = ["Architecture", "Config", "grouped_heads"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xinfer.models.gguf.keys import Keys
from xinfer.models.gguf.layouts import LAYER, TOP, Undo
from xinfer.models.names import Target

Config = dict[str, Any]


def _nothing(keys: Keys) -> Config:
    return {}


def _sharpening(multiplier: float) -> Config:
    return {"mscale": 1.0, "mscale_all_dim": multiplier}


def grouped_heads(keys: Keys) -> Config:
    """Return the shape of grouped-query attention.

    What a file may leave out: `head_count_kv` is `head_count`, `attention.key_length` the embedding's share of a head.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        keys.demand(name, head_dim, why=": queries, keys and values must be as wide as each other")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's files are translated to the config.json and the canonical names of a family.

    Attributes:
        name: what `general.architecture` says.
        model_type: the family, or what tells it from the keys.
        words: from keys to config.json's words, all needed.
        optional: those of which a file may say nothing, and config.json then says nothing either.
        fixed: what config.json says for all such files; the words above go before.
        more: further words, which need more than renaming; they go before all others.
        heads: the words for heads and their widths.
        partial: what config.json calls the share of a head that turns, None where all of it has to.
        base: what it calls the base of the wavelengths.
        local_base: the base of layers with a window, from the others', where the file does not say it and such layers
            have no scaling; None where all layers turn alike.
        turned: what config.json's yarn says besides.
        sharpening: what config.json's yarn says for a `yarn_log_multiplier`.
        layer, top: what tensors are; in a layer it may depend on the file.
        undo: what puts a tensor into the family's order, by its name in a layer or at the top, the last part left off
            where weight and bias go the same way.
    """

    name: str
    model_type: str | Callable[[Keys], str]
    words: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Keys], Config] = _nothing
    heads: Callable[[Keys], Config] = grouped_heads
    partial: str | None = None
    base: str = "rope_theta"
    local_base: Callable[[float], float] | None = None
    turned: Callable[[Keys], Config] = _nothing
    sharpening: Callable[[float], Config] = _sharpening
    layer: Mapping[str, Target] | Callable[[Keys], Mapping[str, Target]] = field(default_factory=lambda: LAYER)
    top: Mapping[str, Target] = field(default_factory=lambda: TOP)
    undo: Mapping[str, Undo] = field(default_factory=dict)
