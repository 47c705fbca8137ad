"""From a checkpoint to transformers' model of it: nothing is fetched, none of its code is run, nothing is guessed."""

__all__ = ["load"]

import io
from contextlib import redirect_stderr
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as talk

from xinfer.errors import ModelError
from xinfer.models.lora.adapter import Adapter
from xinfer.models.model import Model

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def load(model: Model, attention: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model in a precision, on a device; what transformers can't load is a `ModelError` with its reason."""
    options = {"dtype": dtype} | ({} if attention == "auto" else {"attn_implementation": attention})
    level = talk.get_verbosity()
    talk.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):  # progress bars
            made = (_dummy if model.load_format == "dummy" else _stored)(model, options)
            return (made if model.adapter is None else _merged(made, model.adapter)).to(device).eval()
    except ModelError:
        raise
    except Exception as error:  # whatever a library raises that reads a damaged or unknown checkpoint
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{model.path}: transformers can't load it ({reason}): take backend=eager") from error
    finally:
        talk.set_verbosity(level)


def _stored(model: Model, options: dict[str, Any]) -> PreTrainedModel:
    """Return the model with its weights. Those that are missing would be random numbers, so they are refused."""
    folder = model.path
    if folder.is_file():
        folder, options["gguf_file"] = folder.parent, folder.name
    made, found = AutoModelForCausalLM.from_pretrained(
        folder, **options, **_LOCAL, use_safetensors=True, output_loading_info=True
    )
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if wrong := sorted(map(str, found.get(kind) or ())):
            raise ModelError(f"{model.path}: transformers reports {kind} ({', '.join(wrong[:3])}): take backend=eager")
    return made


def _dummy(model: Model, options: dict[str, Any]) -> PreTrainedModel:
    """Return a model of random weights, as transformers initializes them; not those of `backend=eager`."""
    config = AutoConfig.from_pretrained(model.path, **_LOCAL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.dummy_seed)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def _merged(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Return the model with an adapter merged into its weights, by the library that adapters are written with."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    adapted = PeftModel.from_pretrained(model, adapter.folder, local_files_only=True)
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(adapter.scale)
    return adapted.merge_and_unload()
