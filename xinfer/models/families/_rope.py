"""Rotary embeddings in all the spellings of config.json."""

__all__ = ["rope"]

import math
from typing import Any

import numpy as np

from xinfer.errors import ModelError, nearest
from xinfer.models.families import Config
from xinfer.models.families._fields import flag, integer, number, optional
from xinfer.models.rope import KINDS, RopeSpec, mscale

_OTHERWISE_NAMED = {"su": "longrope", "mrope": "default"}  # positions of a text are the same in all three of mrope's


def rope(config: Config, head_dim: int, layer_type: str | None = None, *, interleaved: bool = False) -> RopeSpec:
    """Return the rotary embedding of a config, of one kind of layers where these differ.

    It is said by `rope_theta` and `partial_rotary_factor` beside `rope_scaling` (whose kind is under `rope_type` or
    `type`), or all in `rope_parameters`, or in one of these for each kind of layer.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(given, dict) and layer_type is not None and isinstance(given.get(layer_type), dict):
        given = given[layer_type]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"config.json: rope scaling {given!r} is not supported: one kind for all layers is expected")
    said = {name: value for name, value in given.items() if value is not None}
    merged = {**config, **said}
    dim = int(head_dim * number(merged, "partial_rotary_factor", 1.0))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ModelError(
            f"config.json: rotary embeddings turn pairs, so an even number of up to {head_dim} dimensions, not {dim} "
            "(head_dim, partial_rotary_factor)"
        )
    kind = _kind(said)
    plain = {"dim": dim, "theta": number(merged, "rope_theta", 10_000.0), "interleaved": interleaved, "kind": kind}
    scaled = _parameters(kind, said, config, dim)
    if (growth := optional(said, "llama_4_scaling_beta")) is not None:
        scaled |= {"query_growth": growth, "original_max_len": integer(said, "original_max_position_embeddings")}
    spec = RopeSpec(**plain, **scaled)  # type: ignore[arg-type]
    _check(spec)
    return spec


def _check(spec: RopeSpec) -> None:
    """Refuse numbers that no frequencies come from, however they were combined."""
    try:
        longest = 2 * spec.original_max_len
        with np.errstate(all="ignore"):
            sound = all(np.isfinite(spec.inverse_frequencies(length)).all() for length in (1, longest))
    except (ArithmeticError, ValueError):
        sound = False
    if not sound or not math.isfinite(spec.amplitude):
        raise ModelError(f"config.json: the rope scaling's numbers make no frequencies ({spec})")


def _kind(said: Config) -> str:
    named = {key: _OTHERWISE_NAMED.get(str(said[key]), str(said[key])) for key in ("rope_type", "type") if key in said}
    kind = next(iter(named.values()), "default")
    if any(other != kind for other in named.values()):
        raise ModelError(f"config.json: the rope scaling names two kinds, {named}: remove the wrong one")
    if kind not in KINDS:
        raise ModelError(
            f"config.json: rope scaling of kind {kind!r} is not supported{nearest(kind, KINDS)} "
            f"(supported: {', '.join(KINDS)})"
        )
    return kind


def _parameters(kind: str, said: Config, config: Config, dim: int) -> dict[str, Any]:
    if kind == "linear":
        return {"factor": _needed(said, kind, "factor")}
    if kind == "factors":  # of GGUF alone
        return {"short": _factors(said, kind, "factors", dim)}
    if kind == "dynamic":
        return {
            "factor": _needed(said, kind, "factor"),
            "original_max_len": integer(config, "max_position_embeddings"),
        }
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, original = (_needed(said, kind, name) for name in names)
        if high <= low:
            raise ModelError(f"config.json: rope scaling needs high_freq_factor={high} above low_freq_factor={low}")
        return {
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_len": int(original),
        }
    return _stretched(kind, said, config, dim) if kind != "default" else {}


def _stretched(kind: str, said: Config, config: Config, dim: int) -> dict[str, Any]:
    """Return the parameters of yarn and longrope: what they leave out follows from the lengths of the context."""
    longest = integer(config, "max_position_embeddings", 2048)
    name = "original_max_position_embeddings"
    original = integer({name: config.get(name, said.get(name))}, name, longest)
    factor = number(said, "factor", longest / original)
    parameters: dict[str, Any] = {"factor": factor, "original_max_len": original}
    if kind == "longrope":
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return parameters | {
            "amplitude": number(said, "attention_factor", grown),
            "short": _factors(said, kind, "short_factor", dim),
            "long": _factors(said, kind, "long_factor", dim),
        }
    own, everywhere = optional(said, "mscale"), optional(said, "mscale_all_dim")
    usual = mscale(factor, own) / mscale(factor, everywhere) if own and everywhere else mscale(factor)
    return parameters | {
        "amplitude": number(said, "attention_factor", usual),
        "beta_fast": number(said, "beta_fast", 32.0),
        "beta_slow": number(said, "beta_slow", 1.0),
        "truncate": flag(said, "truncate", default=True),
    }


def _needed(said: Config, kind: str, name: str) -> float:
    if name not in said:
        raise ModelError(f"config.json: rope scaling of kind {kind!r} lacks {name!r}")
    return number(said, name)


def _factors(said: Config, kind: str, name: str, dim: int) -> tuple[float, ...]:
    values = said.get(name)
    if not isinstance(values, list):
        raise ModelError(f"config.json: rope scaling of kind {kind!r} lacks the list {name!r}")
    if len(values) != dim // 2:
        raise ModelError(f"rope scaling: {name} gives {len(values)} factors for {dim // 2} pairs of dimensions")
    return tuple(number({name: value}, name) for value in values)
