"""A model as files for other programs: model.onnx, its weights beside it, and what onnxruntime-genai is told."""

__all__ = ["export_model", "genai_config"]

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from xinfer.backends import BackendContext
from xinfer.backends.onnx.attention import head_width
from xinfer.backends.onnx.decoder import write
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.session import cores
from xinfer.backends.onnx.weights import made
from xinfer.devices import choose_dtype
from xinfer.errors import ConfigError, XinferError
from xinfer.hardware import gibibytes
from xinfer.models.files import read_json
from xinfer.models.spec import DecoderSpec

_GRAPH, _DATA = "model.onnx", "model.onnx.data"
_PAGE = 1 << 16  # where large tensors begin, so that any system can map them
_LARGE, _SMALL = 1 << 20, 64
# What of generation_config.json onnxruntime-genai knows too; any other key it refuses.
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size")


def export_model(context: BackendContext, folder: Path, all_logits: bool) -> None:
    """Write model.onnx, model.onnx.data and genai_config.json; see `Backend.export`."""
    spec, device = context.model.spec, _device(context)
    form = _form(context, device, all_logits)
    model, recipes = write(spec, form)
    needed = sum(_declared(model, name).nbytes for name in recipes)
    if needed > (free := shutil.disk_usage(folder).free):
        raise XinferError(f"{folder}: the model takes {gibibytes(needed)}, but {gibibytes(free)} are free: make room")
    _write_weights(model, made(context.model, recipes, form, context.config.threads or cores()), folder / _DATA)
    ir.save(model, folder / _GRAPH)
    said = genai_config(
        spec,
        form,
        read_json(folder / "config.json"),
        read_json(folder / "generation_config.json", optional=True),
        eos_token_ids=context.model.eos_token_ids,
        device=device,
        threads=context.config.threads,
    )
    (folder / "genai_config.json").write_text(json.dumps(said, indent=2) + "\n", "utf-8")


def _device(context: BackendContext) -> str:
    """Return for which device the files are: unless one is named the CPU, whatever this machine has."""
    device = str(context.config.device).partition(":")[0]
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"backend.device={device!r}: a model is exported for cpu or cuda")
    return "cuda" if device == "cuda" else "cpu"


def _form(context: BackendContext, device: str, all_logits: bool) -> Form:
    """Return what the graph is written for: that precision, or the one in which the device computes fastest."""
    dtype = str(choose_dtype(context.model.dtype, torch.device("cpu"))).removeprefix("torch.")
    if context.model.dtype == "auto" and device == "cuda":
        dtype = "float16"
    refused = {"cuda": "float32", "cpu": "bfloat16"}[device]
    if dtype == refused:
        raise ConfigError(
            f"model.dtype={dtype}: ONNX Runtime has no attention in it on {device}: "
            f"give another, or backend.device={'cpu' if device == 'cuda' else 'cuda'}"
        )
    longest = context.model.spec.context_len(context.limits.max_model_len)
    scheme, level = context.model.quantization, context.config.accuracy_level
    return Form(longest, dtype, scheme, level, genai=True, all_logits=all_logits)


def _declared(model: ir.Model, name: str) -> ir.ExternalTensor:
    tensor = model.graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    return tensor


def _write_weights(model: ir.Model, weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write the graph's weights one after the other, and have the graph say where; one at a time is in memory."""
    with path.open("wb") as file:
        for name, tensor in weights:
            declared = _declared(model, name)
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            assert data.nbytes == declared.nbytes, f"{name} has {data.nbytes} bytes, not {declared.nbytes}"
            file.write(bytes(-file.tell() % (_PAGE if data.nbytes >= _LARGE else _SMALL)))
            model.graph.initializers[name].const_value = ir.ExternalTensor(
                path.name, file.tell(), data.nbytes, declared.dtype, shape=declared.shape, name=name
            )
            file.write(data.data)
            del tensor, data  # before the next is made
        file.flush()
        os.fsync(file.fileno())


def genai_config(
    spec: DecoderSpec,
    form: Form,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    eos_token_ids: tuple[int, ...],
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, Any]:
    """Return the content of genai_config.json.

    `model.type` is `decoder`, which is any model with these inputs; names of families bring along what is of
    onnxruntime-genai's own exports (`gpt2` another cache, `phi3` two graphs). `search.max_length` counts the prompt
    too, so unasked it is the whole context. `pad_token_id` is what onnxruntime-genai pads shorter prompts of a batch
    with, and looks for at their ends.

    Args:
        spec: the model.
        form: what its graph was written for.
        config: config.json.
        generation: generation_config.json.
        eos_token_ids: tokens that end a text.
        device: `cpu` or `cuda`.
        threads: of the CPU, if they are not to be as many as there are cores.
    """
    attention = spec.layers[0].attention  # of layers that differ, onnxruntime-genai asks the graph
    options: dict[str, Any] = {"log_id": "onnxruntime-genai"}
    if threads is not None:
        options["intra_op_num_threads"] = threads
    options["provider_options"] = [{"cuda": {}}] if device == "cuda" else []
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < spec.vocab_size]
    padding = _token_id(spec, generation, config, "pad")
    model: dict[str, Any] = {
        "bos_token_id": _token_id(spec, generation, config, "bos"),
        "context_length": form.max_len,
        "decoder": {
            "session_options": options,
            "filename": _GRAPH,
            "head_size": head_width(attention),
            "hidden_size": spec.hidden_size,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "position_ids": "position_ids",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
            "num_attention_heads": attention.heads,
            "num_hidden_layers": len(spec.layers),
            "num_key_value_heads": attention.kv_heads,
        },
        "eos_token_id": ends,
        "pad_token_id": (ends or [0])[0] if padding is None else padding,
        "type": "decoder",
        "vocab_size": spec.vocab_size,
    }
    search: dict[str, Any] = {"do_sample": False, "max_length": form.max_len, "past_present_share_buffer": True}
    search |= {name: generation[name] for name in _SEARCH if generation.get(name) is not None}
    return {"model": {name: value for name, value in model.items() if value not in (None, [])}, "search": search}


def _token_id(spec: DecoderSpec, generation: Mapping[str, Any], config: Mapping[str, Any], name: str) -> int | None:
    """Return a special token's id, of the first file that has one of the model's."""
    for given in (generation, config):
        found = given.get(f"{name}_token_id")
        if isinstance(found, int) and 0 <= found < spec.vocab_size:
            return found
    return None
