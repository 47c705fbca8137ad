"""A folder in Hugging Face layout: config.json, tokenizer.json, safetensors."""

__all__ = ["ModelFolder"]

from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from xinfer.errors import ModelError
from xinfer.models.json_file import read_object
from xinfer.models.safetensors_reader import read_safetensors, safetensors_files
from xinfer.models.tokenizer import ChatTemplate, Tokenizer
from xinfer.models.weights import Tensors

_COMPRESSED = {"quant_method": "compressed-tensors"}
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


class ModelFolder:
    """A checkpoint's folder; each part is read when asked for, and what is missing is named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json in it, so it is no model folder")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._json("config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or nothing."""
        return self._json("generation_config.json", optional=True)

    @cached_property
    def quantization_config(self) -> dict[str, Any] | None:
        """What says how the weights are quantized, with `quant_method`; None where nothing does.

        It is in config.json: `quantization_config`, or `compression_config` in early compressed-tensors. Before
        transformers knew of it, AutoGPTQ and AutoAWQ had files of their own, which do not name the method.
        """
        for key, implied in (("quantization_config", {}), ("compression_config", _COMPRESSED)):
            if (found := self.config.get(key)) is not None:
                if not isinstance(found, dict):
                    raise ModelError(f"{self.path}: config.json: {key}={found!r}, but an object is expected")
                return {**implied, **found}
        for name, method in _OWN_FILES.items():
            if (self.path / name).is_file():
                return {"quant_method": method, **self._json(name)}
        return None

    def tensors(self) -> Tensors:
        """Return the weights as they are stored, under the checkpoint's names."""
        return read_safetensors(safetensors_files(self.path)[0])

    def stray_files(self) -> list[str]:
        """Return weight files that are there but not read."""
        return [p.name for p in safetensors_files(self.path)[1]]

    def has_tokenizer(self) -> bool:
        """Whether there is one."""
        return (self.path / "tokenizer.json").is_file()

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
        return read_object(file)
