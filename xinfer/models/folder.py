"""A folder in Hugging Face layout: config.json, tokenizer.json, safetensors."""

__all__ = ["ModelFolder"]

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from xinfer.errors import ModelError
from xinfer.models.tokenizer import ChatTemplate, Tokenizer
from xinfer.models.weights import Tensors, read_safetensors, safetensors_files


class ModelFolder:
    """A checkpoint's folder; each part is read when asked for, and what is missing is named.

    `config` is the file that is read as its config.json, where that is another than the one in it.
    """

    def __init__(self, path: Path, config: Path | None = None) -> None:
        self.path = path
        self._config_name = "config.json" if config is None else config.name
        if not (path / self._config_name).is_file():
            raise ModelError(f"{path}: no config.json in it, so it is no model folder")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._json(self._config_name)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or nothing."""
        return self._json("generation_config.json", optional=True)

    def tensors(self) -> Tensors:
        """Return the weights, under the checkpoint's names."""
        return read_safetensors(safetensors_files(self.path)[0])

    def stray_files(self) -> list[str]:
        """Return weight files that are there but not read."""
        return [p.name for p in safetensors_files(self.path)[1]]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of tokenizer.json with the chat template beside it."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{self.path}: no tokenizer.json in it, the one format that is read from a folder")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for a damaged file
            raise ModelError(f"{file}: not a tokenizer ({error}): download it again") from error
        config = self._json("tokenizer_config.json", optional=True)
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict) and value
        }
        template = self._chat_template(config)
        return Tokenizer(backend, ChatTemplate(template, special) if template else None)

    def _chat_template(self, config: dict[str, Any]) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        return str(template) if template else None

    def _json(self, name: str, optional: bool = False) -> dict[str, Any]:
        file = self.path / name
        if optional and not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{file}: not valid JSON ({error}): download it again") from error
        if not isinstance(content, dict):
            raise ModelError(f"{file}: a JSON object is expected, not {type(content).__name__}")
        return content
