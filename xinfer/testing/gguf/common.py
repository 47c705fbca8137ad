"""What keys and layouts both ask of a config.json."""

__all__ = ["Config", "first", "head_dim", "turning"]

from typing import Any

Config = dict[str, Any]


def first(config: Config, *words: str) -> Any:
    """Return the first of these words' value that is there, None if none is."""
    return next((config[word] for word in words if word in config), None)


def head_dim(config: Config) -> int:
    """Return the width of a head."""
    heads = first(config, "num_attention_heads", "n_head")
    dim: int = config.get("head_dim") or first(config, "hidden_size", "n_embd") // heads
    return dim


def turning(config: Config) -> Config:
    """Return the rope parameters of layers that see all."""
    given: Config = config.get("rope_parameters") or {}
    found: Config = given.get("full_attention", given)
    return found
