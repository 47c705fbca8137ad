"""A folder in Hugging Face layout: config.json, a tokenizer's files, safetensors."""

__all__ = ["ModelFolder"]

from functools import cached_property
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError
from xinfer.models.files import read_json
from xinfer.models.tokenizer import Tokenizer
from xinfer.models.tokenizer_files import read_tokenizer
from xinfer.models.weights import Tensors, read_safetensors, safetensors_files


class ModelFolder:
    """A checkpoint's folder; each part is read when asked for, and what is missing is named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json in it, so it is no model folder")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_json(self.path / "config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or nothing."""
        return read_json(self.path / "generation_config.json", optional=True)

    def tensors(self) -> Tensors:
        """Return the weights, under the checkpoint's names."""
        return read_safetensors(safetensors_files(self.path)[0])

    def stray_files(self) -> list[str]:
        """Return weight files that are there but not read."""
        return [p.name for p in safetensors_files(self.path)[1]]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the folder's files, with the chat template beside it."""
        return read_tokenizer(self.path, str(self.config.get("model_type", "")))
