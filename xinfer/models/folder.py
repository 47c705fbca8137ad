"""A folder in Hugging Face layout: config.json, a tokenizer's files, safetensors."""

__all__ = ["ModelFolder"]

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError
from xinfer.models.files import read_json
from xinfer.models.licenses import folder_license
from xinfer.models.multimodal import text_part
from xinfer.models.names import Names
from xinfer.models.quantized import dequantized, describe, without_unused_biases
from xinfer.models.safetensors_reader import read_safetensors, safetensors_files
from xinfer.models.text.tokenizer import Tokenizer
from xinfer.models.text.tokenizer_files import find_tokenizer, read_tokenizer
from xinfer.models.weights import Tensors

_COMPRESSED = {"quant_method": "compressed-tensors"}
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


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
        return read_json(self.path / self._config_name)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or nothing."""
        return read_json(self.path / "generation_config.json", optional=True)

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
                return {"quant_method": method, **read_json(self.path / name)}
        return None

    @property
    def has_weights(self) -> bool:
        """Whether there are any weights; without, a model can be described, not loaded."""
        return self._config_name == "config.json" and any(self.path.glob("*.safetensors"))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return tuple(safetensors_files(self.path)[0])

    def names(self, usual: Names) -> Names:
        """Return how tensors are named: as the family's checkpoints usually name them."""
        return usual

    def tensors(self, needed: Callable[[str], bool]) -> Tensors:
        """Return the weights under the checkpoint's names, dequantized when read; `needed` tells which will be."""
        tensors = read_safetensors(list(self.files))
        if self.quantization_config is None:
            return tensors
        return without_unused_biases(dequantized(tensors, self.quantization_config), needed)

    def notes(self, dtype: str) -> list[str]:
        """Return what a user should know who has it computed in a precision, without reading a weight."""
        notes = []
        if stray := [p.name for p in safetensors_files(self.path)[1]]:
            notes.append(f"not read, since the index does not name them: {', '.join(stray)}")
        if self.quantization_config is not None:
            precision = "the device's precision" if dtype == "auto" else dtype
            notes.append(f"{describe(self.quantization_config)}, computed in {precision} after dequantizing")
        return notes

    @property
    def license(self) -> tuple[str, str] | None:
        """The licence and where it is said: in README.md, or by a file's name."""
        return folder_license(self.path)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: of generation_config.json, else config.json."""
        ids = self.generation_config.get("eos_token_id", text_part(self.config).get("eos_token_id"))
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)

    def has_tokenizer(self) -> bool:
        """Whether there is one."""
        return find_tokenizer(self.path) is not None

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the folder's files, with the chat template beside it."""
        return read_tokenizer(self.path, str(self.config.get("model_type", "")))
