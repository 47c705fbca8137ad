"""A tiny llama whose projections are stored as a test wants them, and what a backend would get of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.tiny import tiny_config, write_folder

# Returns the stored parts of one weight [out, in], and what they stand for.
Quantize = Callable[[np.random.Generator, int, int], tuple[dict[str, Tensor], np.ndarray]]


class Checkpoint:
    """A folder with quantized weights, beside one that holds the same weights plainly."""

    def __init__(self, path: Path, quantize: Quantize, quantization_config: dict[str, Any] | None) -> None:
        config = tiny_config("llama", num_hidden_layers=2)
        self.path = write_folder(path / "quantized", config, 3)
        self.plain = write_folder(path / "plain", config, 3)
        rng, self.stored, self.weights = np.random.default_rng(1), {}, load_file(self.plain / "model.safetensors")
        for name, tensor in self.weights.items():
            if name.endswith("_proj.weight"):
                parts, weight = quantize(rng, *tensor.shape)
                assert weight.dtype == np.float32 and weight.shape == tuple(tensor.shape)
                self.stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
                self.weights[name] = torch.from_numpy(np.ascontiguousarray(weight))
            else:
                self.stored[name] = tensor
        self.save()
        save_file(self.weights, self.plain / "model.safetensors", {"format": "pt"})
        self.configure(quantization_config=quantization_config)

    def save(self) -> None:
        """Write the stored tensors, as a test may have changed them."""
        contiguous = {name: tensor.contiguous() for name, tensor in self.stored.items()}
        save_file(contiguous, self.path / "model.safetensors", {"format": "pt"})

    def configure(self, **changes: Any) -> None:
        """Write other fields of config.json; None leaves one out."""
        file = self.path / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    def model(self) -> Model:
        return Model(str(self.path), lambda: self.path, xinfer_model_families())

    def check(self) -> None:
        """Compare all that a backend would get with what was written, bit by bit."""
        weights, find = self.model().weights, self.model().family.names.find
        expected = {find(name).stored.parts[0]: tensor for name, tensor in self.weights.items()}
        assert set(weights) == set(expected)
        for name in weights:
            found = weights.load(name)
            assert found.dtype == expected[name].dtype
            assert torch.equal(found, expected[name]), name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[Quantize, dict[str, Any] | None], Checkpoint]:
    return lambda quantize, config=None: Checkpoint(tmp_path, quantize, config)
