"""Checkpoints of any size that take no room on the disk: headers as they should be, holes for numbers.

For measuring how weights are loaded. What is read from them is zeros, through the same pages as any other numbers.
"""

__all__ = ["hollow_folder", "hollow_gguf"]

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from xinfer.testing.tiny import gguf_name, gguf_writer, tensor_shapes

Config = dict[str, Any]

_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def hollow_folder(path: Path, config: Config, kind: str = "F32", shards: int = 1) -> Path:
    """Write config.json and safetensors of this kind (F32, BF16, F16), in so many files, and return the folder."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = list(tensor_shapes(config))
    names = (
        [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    )
    weight_map = {name: names[i * shards // len(tensors)] for i, (name, _) in enumerate(tensors)}
    for file in names:
        _hollow_safetensors(path / file, {n: shape for n, shape in tensors if weight_map[n] == file}, kind)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    return path


def _hollow_safetensors(file: Path, shapes: dict[str, tuple[int, ...]], kind: str) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * _BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)


def hollow_gguf(path: Path, config: Config, kind: str = "Q8_0") -> Path:
    """Write a GGUF file with matrices of this type, norms and biases F32, and return its path."""
    writer, types = gguf_writer(path, config), gguf.GGMLQuantizationType
    end = 0
    for name, shape in tensor_shapes(config):
        used = types[kind] if len(shape) == 2 else types.F32
        block, size = gguf.GGML_QUANT_SIZES[used]
        nbytes = math.prod(shape) // block * size
        writer.add_tensor_info(gguf_name(name), shape, np.dtype(np.float32), nbytes, raw_dtype=used)
        end += -(-nbytes // writer.data_alignment) * writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // writer.data_alignment) * writer.data_alignment + end)
    return path
