"""GGUF files made from checkpoints as llama.cpp's converter makes them, keys, names and layouts; for tests.

Nothing here looks at how xinfer reads such files: names are translated by the `gguf` package's own tables, the rest is
what `conversion` in https://github.com/ggml-org/llama.cpp does. `tests/data/make_gguf_texts.py` compares both. Needs
`transformers`, which knows what a config.json leaves out.
"""

__all__ = ["ARCHITECTURES", "GGUF_SHAPES", "convert", "gguf_shape"]

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH as ARCH
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from xinfer.testing.gguf.common import first
from xinfer.testing.gguf.keys import keys_of
from xinfer.testing.gguf.layouts import Array, laid_out
from xinfer.testing.gguf.shapes import GGUF_SHAPES, gguf_shape

ARCHITECTURES: dict[str, ARCH] = {
    "llama": ARCH.LLAMA,
    "mistral": ARCH.LLAMA,
    "mixtral": ARCH.LLAMA,
    "qwen2": ARCH.QWEN2,
    "qwen2_moe": ARCH.QWEN2MOE,
    "qwen3": ARCH.QWEN3,
    "qwen3_moe": ARCH.QWEN3MOE,
    "gemma": ARCH.GEMMA,
    "gemma2": ARCH.GEMMA2,
    "gemma3_text": ARCH.GEMMA3,
    "phi": ARCH.PHI2,
    "phi3": ARCH.PHI3,
    "gpt2": ARCH.GPT2,
    "gpt_neox": ARCH.GPTNEOX,
    "gpt_oss": ARCH.GPT_OSS,
    "deepseek_v2": ARCH.DEEPSEEK2,
    "deepseek_v3": ARCH.DEEPSEEK2,
    "cohere": ARCH.COMMAND_R,
    "cohere2": ARCH.COHERE2,
    "falcon": ARCH.FALCON,
    "stablelm": ARCH.STABLELM,
    "starcoder2": ARCH.STARCODER2,
    "olmo": ARCH.OLMO,
    "olmo2": ARCH.OLMO2,
    "olmo3": ARCH.OLMO2,
    "olmoe": ARCH.OLMOE,
    "granite": ARCH.GRANITE,
    "granitemoe": ARCH.GRANITE_MOE,
    "granitemoeshared": ARCH.GRANITE_MOE,
    "smollm3": ARCH.SMOLLM3,
    "glm4": ARCH.GLM4,
    "glm4_moe": ARCH.GLM4_MOE,
    "glm4_moe_lite": ARCH.DEEPSEEK2,
    "dots1": ARCH.DOTS1,
    "arcee": ARCH.ARCEE,
    "seed_oss": ARCH.SEED_OSS,
    "nemotron": ARCH.NEMOTRON,
    "exaone4": ARCH.EXAONE4,
    "ernie4_5": ARCH.ERNIE4_5,
    "gpt_bigcode": ARCH.STARCODER,
    "hunyuan_v1_dense": ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": ARCH.HUNYUAN_MOE,
    "ministral3": ARCH.MISTRAL3,
}


def _as_it_is(name: str, tensor: Array) -> Iterable[tuple[str, Array]]:
    return [(name, tensor)]


def convert(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    rewrite: Callable[[str, Array], Iterable[tuple[str, Array]]] = _as_it_is,
) -> Path:
    """Write the model in a folder in Hugging Face layout as a GGUF file, and return its path.

    Args:
        folder: what is converted.
        path: what is written; it has no vocabulary, only its size.
        kind: type of all matrices whose rows are whole blocks of it, but of routers and other small ones.
        keys: changes to the architecture's keys; None takes one away.
        rewrite: what becomes of a tensor at last, by the file's name for it.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).to_dict()
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_tokenizer_model("none")
    for name, value in {**keys_of(config, architecture), **(keys or {})}.items():
        if value is not None:
            _add(writer, f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name}", value)
    names = gguf.get_tensor_name_map(architecture, first(config, "num_hidden_layers", "n_layer"))
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    for name, tensor in laid_out(tensors, config):
        found = name if name.startswith("rope_") else names.get_name(name, (".weight", ".bias"))
        if found is None:
            raise ValueError(f"llama.cpp has no place for {name}")
        for final, values in rewrite(found, tensor):
            _add_tensor(writer, final, np.ascontiguousarray(values), GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Array, kind: GGMLQuantizationType) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.ndim == 1 or "ffn_gate_inp" in name or "_norm" in name or tensor.shape[-1] % block:
        kind = GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)
