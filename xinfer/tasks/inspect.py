"""`python -m xinfer inspect [MODEL]`: what a model is and what it needs, from its description and its files' headers.

No weight is read and no backend loaded. With `--json` one object is printed, with these keys (bytes are whole numbers):

- `model`, `path`, `family`, `license` (and `license_source`; both null if nothing states it), `notes`;
- `parameters`, `active_parameters` (what one token needs: of experts those chosen), `parts` (see `parts.Part`);
- `weight_bytes` in `dtype`, the precision to compute in; `stored_weight_bytes` in the files, and `unused_bytes` in them
  that the model does not need (null where there are no files);
- `kv_bytes_per_token`, `max_model_len` (the context that it was made for), `vocab_size`, `hidden_size`, `num_layers`,
  `tied`, `outline`, `layer_kinds` (see `summary.LayerKind`);
- `device`; `memory` (see `estimate.Memory`) with `total_bytes` and `fits`, for `engine.max_num_seqs` sequences of
  `engine.max_model_len` tokens; `floors`: `read_bandwidth_bytes_s`, `flop_s`, `measured` (a day), `decode` (a list of
  `estimate.Decode`), `prefill` (`estimate.Prefill`);
- `backends`: by name `runs`, `reason` (why not) and `summary`.
"""

__all__ = ["describe", "run"]

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from xinfer import hardware
from xinfer.config import Config
from xinfer.devices import choose_device, choose_dtype
from xinfer.hardware import gibibytes
from xinfer.models.cache import cache_folder
from xinfer.models.model import Model
from xinfer.models.parts import Part, parts
from xinfer.models.quantize import Scheme
from xinfer.models.spec import DecoderSpec
from xinfer.models.summary import layer_kinds, outline
from xinfer.plugins import Plugins
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.estimate import Entry, Memory, decode_floor, memory, prefill_floor
from xinfer.tasks.inspect_page import show


def run(config: Config, job: Job) -> int:
    """Print the page, or with `json` the object, on standard output."""
    found = describe(config, job.plugins)
    if config.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


def describe(config: Config, plugins: Plugins) -> dict[str, Any]:
    """Return what is known of the configured model, by the keys above.

    A model that can't be described, or whose files do not hold what it says, is a `ModelError`.
    """
    session = Session(config, plugins)
    limits = session.limits
    reference = config.model.reference
    model = session.described
    spec = model.spec
    device = choose_device(getattr(config.backend, "device", "auto"))
    dtype = choose_dtype(config.model.dtype, device)
    if threads := getattr(config.backend, "threads", None):
        torch.set_num_threads(threads)  # with which the speed is measured
    made_of = parts(spec, dtype.itemsize, model.weights if model.has_weights else None)
    entry = partial(session.backend.entry_bytes, config=config.backend, element=dtype.itemsize)
    needs = memory(spec, limits, dtype, entry, hardware.available_memory(device))
    licensed = model.license or (None, None)
    return {
        "model": reference,
        "path": str(model.path),
        "family": spec.family,
        "license": licensed[0],
        "license_source": licensed[1],
        **_sizes(model, made_of),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes_per_token": sum(entry(layer.attention) for layer in spec.layers),
        "max_model_len": spec.max_model_len,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": len(spec.layers),
        "tied": spec.tied,
        "outline": outline(spec),
        "layer_kinds": [asdict(kind) for kind in layer_kinds(spec)],
        "device": str(device),
        "memory": asdict(needs) | {"total_bytes": needs.total_bytes, "fits": needs.total_bytes <= needs.free_bytes},
        "floors": _floors(spec, made_of, dtype, device, entry, needs),
        "backends": _backends(config, plugins, spec),
        "notes": _notes(model, config),
    }


def _sizes(model: Model, made_of: list[Part]) -> dict[str, Any]:
    stored = sum(size for part in made_of for size in part.stored_bytes.values())
    there = model.has_weights and model.load_format != "dummy"
    return {
        "parameters": model.spec.parameters,
        "active_parameters": sum(part.active_parameters for part in made_of),
        "parts": [asdict(part) for part in made_of],
        "weight_bytes": sum(part.weight_bytes for part in made_of),
        "stored_weight_bytes": stored if there else None,
        "unused_bytes": model.weights.stored_bytes - stored if there else None,
    }


def _floors(
    spec: DecoderSpec, made_of: list[Part], dtype: torch.dtype, device: torch.device, entry: Entry, needs: Memory
) -> dict[str, Any]:
    """Return the floors of one sequence with an empty and a full cache, and of as many as may run with full ones."""
    speed, length = hardware.speed(device, cache=cache_folder()), needs.max_model_len
    cases = dict.fromkeys([(1, 0), (1, length), (needs.max_num_seqs, length)])
    return {
        "read_bandwidth_bytes_s": speed.read_bytes_s,
        "flop_s": speed.flop_s(dtype),
        "measured": speed.measured,
        "decode": [asdict(decode_floor(spec, dtype.itemsize, n, tokens, speed, entry)) for n, tokens in cases],
        "prefill": asdict(prefill_floor(made_of, speed.flop_s(dtype))),
    }


def _backends(config: Config, plugins: Plugins, spec: DecoderSpec) -> dict[str, Any]:
    """Return what every backend says of the model, the configured one with its configuration; one may raise."""
    found: dict[str, Any] = {}
    for name, backend in sorted(plugins.backends.items()):
        try:
            own = config.backend if name == config.backend.name else backend.config()
            reason = backend.refusal(spec, own)
            if reason is None and config.model.quantization is not None and not backend.quantizes:
                reason = f"model.quantization={config.model.quantization}: it computes with the weights as they are"
        except Exception as error:  # whatever a stranger's code raises
            reason = f"it could not tell ({type(error).__name__}: {error})"
        found[name] = {"runs": reason is None, "reason": reason, "summary": backend.summary}
    for name, why in plugins.failed.items():
        found.setdefault(name, {"runs": False, "reason": f"its plugin could not be loaded: {why}", "summary": ""})
    return found


def _rounded(model: Model, scheme: Scheme) -> Iterator[tuple[Scheme, tuple[int, ...]]]:
    """Yield how each matrix that is rounded is, and its shape."""
    for name, shape in model.spec.tensors.items():
        if (own := scheme.of(name, shape)) is not None:
            yield own, shape


def _notes(model: Model, config: Config) -> list[str]:
    """Return what a user should know: the model's own notes, as far as headers tell them."""
    notes = model.header_notes[:]
    if model.quantization is not None:
        rounded = sum(own.nbytes(shape) for own, shape in _rounded(model, model.quantization))
        notes.append(
            f"model.quantization={config.model.quantization} holds its matrices in {gibibytes(rounded)}; sizes and "
            "times here are of the precision that is computed in"
        )
    if not model.has_weights:
        notes.append("no weights (*.safetensors) are here: it is described by its config.json alone, and can't be run")
    elif model.weights.spare_head is not None:
        notes.append(f"the model is tied, so its embedding is the head; {model.weights.spare_head} is not used")
    if model.spec.default_len < model.spec.max_model_len:
        notes.append(
            f"a run takes contexts of {model.spec.default_len:,} tokens unless engine.max_model_len asks for more: "
            "longer ones turn all positions otherwise"
        )
    return notes
