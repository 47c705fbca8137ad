"""adapter_config.json of a PEFT folder: what of it decides the merged weights; what can't be merged is refused."""

__all__ = ["INSTEAD", "LoraConfig", "parse_lora"]

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.errors import ConfigError, ModelError
from xinfer.models.files import read_json

_SCALE = re.compile(r"(.*):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", re.DOTALL)
INSTEAD = "merge it with PEFT (merge_and_unload) and give the merged folder as the model"

# What says how an adapter was trained, or what its file shows by itself; fan_in_fan_out follows from the family.
_HARMLESS = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "bias", "lora_bias", "use_dora", "fan_in_fan_out", "ensure_weight_tying", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core"),
}
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "base_model_name_or_path"}
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the base model too
# A pattern of a stranger's must not take long to match: repetitions of single characters only, and few of them.
_PATTERN = re.compile(r"(?:[\w|^$()\[\]-]|\\?\.|\\d|(?<=[\w.\]])[*+](?![*+]))*")
_MOST_REPETITIONS = 2


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What decides how large an adapter's changes are.

    Attributes:
        rank, alpha: r and lora_alpha.
        ranks, alphas: those of modules whose names end in what an expression matches; the first that does counts.
        rslora: whether alpha is divided by the root of the rank.
        base: the model that the adapter was made for, if it is said.
    """

    rank: int
    alpha: float
    ranks: dict[str, Any]
    alphas: dict[str, Any]
    rslora: bool
    base: str | None

    @classmethod
    def read(cls, file: Path) -> "LoraConfig":
        """Read adapter_config.json; what it asks for that is not done here is a `ModelError` that names it."""
        config = read_json(file)
        kind = config.get("peft_type")
        if kind != "LORA":
            raise ModelError(f"{file}: peft_type={kind!r} is not supported (supported: LORA): {INSTEAD}")
        if config.get("init_lora_weights", True) not in _INITIAL:
            raise ModelError(
                f"{file}: init_lora_weights={config['init_lora_weights']!r} changes the base model too, which is not "
                "supported: save the adapter with path_initial_model_for_weight_conversion"
            )
        for name, value in config.items():
            if value and name not in _HARMLESS | _READ | {"init_lora_weights"}:
                raise ModelError(f"{file}: {name}={value!r} is not supported: {INSTEAD}")
        flag = config.get("use_rslora") or False
        if not isinstance(flag, bool):
            raise ModelError(f"{file}: use_rslora={flag!r}, but true or false is expected")
        base = config.get("base_model_name_or_path")
        return cls(
            rank=_rank(file, "r", config.get("r", 8)),
            alpha=_number(file, "lora_alpha", config.get("lora_alpha", 8)),
            ranks={key: _rank(file, f"rank_pattern[{key!r}]", value) for key, value in _pattern(file, config, "rank")},
            alphas={
                key: _number(file, f"alpha_pattern[{key!r}]", value) for key, value in _pattern(file, config, "alpha")
            },
            rslora=flag,
            base=base if isinstance(base, str) and base else None,
        )

    def rank_of(self, module: str) -> int:
        """Return the rank that a module's change must have."""
        return int(_matching(self.ranks, module, self.rank))

    def factor(self, module: str) -> float:
        """Return the factor on a module's B @ A."""
        rank = self.rank_of(module)
        return float(_matching(self.alphas, module, self.alpha)) / (math.sqrt(rank) if self.rslora else rank)


def parse_lora(text: str) -> tuple[str, float]:
    """Return the reference and the scale of `reference[:scale]`, 1 where none is given; only a number is a scale."""
    match = _SCALE.fullmatch(text)
    if match is None:
        return text, 1.0
    scale = float(match[2])
    if not math.isfinite(scale):
        raise ConfigError(f"model.lora={text!r}: the scale {match[2]} is out of range: give a finite number")
    return match[1], scale


def _matching(table: dict[str, Any], module: str, default: float) -> Any:
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _rank(file: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file}: {name}={value!r}, but a whole number of at least 1 is expected")
    return value


def _number(file: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ModelError(f"{file}: {name}={value!r}, but a number is expected")
    return float(value)


def _pattern(file: Path, config: dict[str, Any], which: str) -> list[tuple[str, Any]]:
    """Return the entries of a table from expressions to numbers."""
    table = config.get(f"{which}_pattern") or {}
    if not isinstance(table, dict):
        raise ModelError(f"{file}: {which}_pattern={table!r}, but an object is expected")
    for key in table:
        try:
            re.compile(key)
            sound = _PATTERN.fullmatch(key) and key.count("*") + key.count("+") <= _MOST_REPETITIONS
        except (re.error, RecursionError, OverflowError):
            sound = False
        if not sound:
            raise ModelError(f"{file}: {which}_pattern has {key!r}, an expression that is not supported: {INSTEAD}")
    return list(table.items())
