"""Checkpoints written by `transformers`, which is the reference for what they mean. Needs that package."""

__all__ = ["reference_logits", "write_reference"]

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write_reference(
    folder: Path, config: dict[str, Any], seed: int, max_shard_size: str = "5GB", auto: str = "AutoModelForCausalLM"
) -> Any:
    """Write a model with random weights as the reference stores it, and return the reference's own model of it.

    config.json holds `config` as it was given; `auto` names the class that makes models of its kind. Weights are large
    enough that errors show; factors of norms are not one.
    """
    import transformers
    from transformers import AutoConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    said = json.dumps(config, indent=2)
    (folder / "config.json").write_text(said, "utf-8")
    make: Any = getattr(transformers, auto).from_config
    model = make(AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "config.json").write_text(said, "utf-8")
    return model


def randomize(model: Any, seed: int) -> None:
    """Give all weights random values, and what routers add to scores."""
    generator = torch.Generator().manual_seed(seed)
    offset = any(family in model.config.model_type for family in ("gemma", "nemotron"))
    learned = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction" in n)]
    for name, tensor in learned:
        mean, scale = 0.0, 0.3
        if ("norm" in name and name.endswith("weight")) or name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
            mean, scale = 0.0 if offset else 1.0, 0.2
        elif tensor.ndim > 1:
            kind = model.config.model_type
            backwards = (kind == "gpt2" and ".c_" in name) or (kind == "gpt_oss" and tensor.ndim == 3)
            wide = any(
                part in name for part in ("q_proj", "k_proj", "qkv", "c_attn", "embed", "wte", "lm_head", "gate.weight")
            )
            scale = (1.5 if wide else 1.0) / math.sqrt(tensor.shape[-2 if backwards else -1])
        tensor.data.normal_(mean, scale, generator=generator)


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Return logits at every position [T, vocabulary], computed at once and without a cache."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()
