"""A model: where it lies, what it is, and its parts, each read when first asked for."""

__all__ = ["Model"]

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError, nearest
from xinfer.models.families import Family
from xinfer.models.folder import ModelFolder
from xinfer.models.gguf import GgufFile
from xinfer.models.gguf_tokenizer import tokenizer_from_gguf
from xinfer.models.multimodal import text_part
from xinfer.models.names import CANONICAL
from xinfer.models.spec import DecoderSpec
from xinfer.models.tokenizer import Tokenizer
from xinfer.models.weights import Tensors, Weights, dummy_weights, safetensors_files


class Model:
    """A checkpoint on this machine.

    Args:
        reference: how the user named it.
        locate: returns where it lies, a folder in Hugging Face layout or a .gguf file (see `sources.resolve`); not
            called before something of the model is asked for.
        families: those that can be described.
        dtype: precision to compute in: `auto` (the device's backend decides), float32, bfloat16, float16.
        load_format: `auto`, or `dummy` for random weights of the right shapes.
    """

    def __init__(
        self,
        reference: str,
        locate: Callable[[], Path],
        families: Iterable[Family],
        *,
        dtype: str = "auto",
        load_format: str = "auto",
    ) -> None:
        self.reference, self.dtype, self.load_format = reference, dtype, load_format
        self._locate = locate
        self._families = {f.name: f for f in families}

    @cached_property
    def path(self) -> Path:
        """Where the model lies."""
        return self._locate()

    @cached_property
    def _source(self) -> GgufFile | ModelFolder:
        if not self.path.is_file():
            return ModelFolder(self.path)
        return GgufFile(self.path, [each for family in self._families.values() for each in family.gguf])

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, of a model that reads images too its text part; or a GGUF file's metadata in its words."""
        return text_part(self._source.config)

    @cached_property
    def family(self) -> Family:
        """What describes the model; an unknown `model_type` is a `ModelError` that lists those there are."""
        name = self.config.get("model_type")
        if not isinstance(name, str) or name not in self._families:
            raise ModelError(
                f"{self.path}: model_type={name!r} is not supported{nearest(str(name), self._families)} "
                f"(supported: {', '.join(sorted(self._families))})"
            )
        return self._families[name]

    @cached_property
    def spec(self) -> DecoderSpec:
        """The model as data."""
        return self.family.spec(self.config)

    @cached_property
    def weights(self) -> Weights:
        """The weights, checked against the spec; none is read yet."""
        if self.load_format == "dummy":
            return Weights(self.spec, dummy_weights(self.spec), CANONICAL.find)
        names = self._source.names if isinstance(self._source, GgufFile) else self.family.names
        return Weights(self.spec, self._tensors, names.find)

    @cached_property
    def _tensors(self) -> Tensors:
        return self._source.tensors()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template."""
        if isinstance(self._source, GgufFile):
            return tokenizer_from_gguf(self._source.metadata)
        return self._source.tokenizer()

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: of generation_config.json, else config.json; of GGUF, end of sequence and of turn."""
        if isinstance(self._source, GgufFile):
            keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            return tuple(dict.fromkeys(self._source.metadata[k] for k in keys if k in self._source.metadata))
        ids = self._source.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What generation_config.json says of sampling, by the names of `SamplingParams`; a GGUF file says nothing."""
        given = {} if isinstance(self._source, GgufFile) else self._source.generation_config
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: given[name] for name in names if given.get(name) is not None}

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        if self.load_format == "dummy":
            return []
        return [self.path] if self.path.is_file() else safetensors_files(self.path)[0]

    @cached_property
    def notes(self) -> list[str]:
        """What a user should know about how the checkpoint was read."""
        notes = []
        if isinstance(self._source, ModelFolder) and self.load_format == "auto":
            if stray := self._source.stray_files():
                notes.append(f"not read, since the index does not name them: {', '.join(stray)}")
            others = Counter(filter(None, map(self.family.names.other_part, self._tensors.shapes)))
            if others:
                names = ", ".join(sorted(others))
                notes.append(f"only its text part is read, not {names} ({others.total()} tensors)")
            if self.weights.head_differs():
                notes.append("the model is tied, so its embedding is the head; the file's other head is ignored")
        return notes

    def config_hash(self) -> str:
        """Return a hash of what the spec says."""
        return hashlib.sha256(repr(self.spec).encode()).hexdigest()
