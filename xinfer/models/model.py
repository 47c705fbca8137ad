"""A model: where it lies, what it is, and its parts, each read when first asked for."""

__all__ = ["Model"]

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError, nearest
from xinfer.models.dummy import byte_tokenizer, dummy_weights
from xinfer.models.families import Family
from xinfer.models.folder import ModelFolder
from xinfer.models.gguf.file import GgufFile
from xinfer.models.lora.adapter import Adapted, Adapter
from xinfer.models.multimodal import text_part
from xinfer.models.names import CANONICAL
from xinfer.models.quantize.scheme import Scheme
from xinfer.models.spec import DecoderSpec
from xinfer.models.text.tokenizer import Tokenizer
from xinfer.models.weights import Tensors, Weights


class Model:
    """A checkpoint on this machine.

    Args:
        reference: how the user named it.
        locate: returns where it lies, a folder in Hugging Face layout or a .gguf file (see `sources.resolve`), or a
            config.json by itself, to be described only; not called before something of the model is asked for.
        families: those that can be described.
        dtype: precision to compute in: `auto` (the device's backend decides), float32, bfloat16, float16.
        load_format: `auto`, or `dummy` for random weights of the right shapes.
        dummy_seed: what those are random by.
        adapter: returns what is merged into the weights, if anything is; not called before it is needed.
        quantization: how a backend is to round the weights, which are as they are here.
        stream_layers: how many of the layers a backend is to have in memory at once; None for all.
    """

    def __init__(
        self,
        reference: str,
        locate: Callable[[], Path],
        families: Iterable[Family],
        *,
        dtype: str = "auto",
        load_format: str = "auto",
        dummy_seed: int = 0,
        adapter: Callable[[], Adapter] | None = None,
        quantization: Scheme | None = None,
        stream_layers: int | None = None,
    ) -> None:
        self.reference, self.dtype, self.load_format, self.quantization = reference, dtype, load_format, quantization
        self.dummy_seed, self._locate, self._find_adapter = dummy_seed, locate, adapter
        self.stream_layers = stream_layers
        self._families = {f.name: f for f in families}

    @cached_property
    def path(self) -> Path:
        """Where the model lies."""
        return self._locate()

    @cached_property
    def _source(self) -> GgufFile | ModelFolder:
        if not self.path.is_file():
            return ModelFolder(self.path)
        if self.path.suffix == ".json":
            return ModelFolder(self.path.parent, self.path)
        return GgufFile(self.path, [each for family in self._families.values() for each in family.gguf])

    @property
    def has_weights(self) -> bool:
        """Whether there are any weights, or they are dummies; without, a model can be described, not loaded."""
        return self.load_format == "dummy" or self._source.has_weights

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
    def adapter(self) -> Adapter | None:
        """What is merged into the weights; one that can't be is a `ModelError`."""
        return None if self._find_adapter is None else self._find_adapter()

    @cached_property
    def weights(self) -> Weights:
        """The weights, checked against the spec; none is read yet."""
        if self.load_format == "dummy":
            tensors, find = dummy_weights(self.spec, self.dummy_seed), CANONICAL.find
        else:
            tensors, find = self._tensors, self._source.names(self.family.names).find
        if self.adapter is None:
            return Weights(self.spec, tensors, find)
        return Adapted(self.spec, tensors, find, self.adapter, self.family.names.find)

    @cached_property
    def _tensors(self) -> Tensors:
        return self._source.tensors(self._needs)

    def _needs(self, name: str) -> bool:
        found = self.family.names.find(name)
        return found is not None and all(part in self.spec.tensors for part in found.stored.parts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template; of a dummy that has none, one of bytes."""
        if self.load_format == "dummy" and not self._source.has_tokenizer():
            return byte_tokenizer()
        return self._source.tokenizer()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, as the checkpoint says."""
        return self._source.eos_token_ids

    @property
    def license(self) -> tuple[str, str] | None:
        """The licence and where that is said; None where nothing says it."""
        return self._source.license

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What generation_config.json says of sampling, by the names of `SamplingParams`."""
        given, names = self._source.generation_config, ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: given[name] for name in names if given.get(name) is not None}

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights, without an adapter's."""
        return [] if self.load_format == "dummy" else list(self._source.files)

    @cached_property
    def notes(self) -> list[str]:
        """What a user should know about how the checkpoint was read."""
        notes = self.header_notes
        if self.load_format != "dummy" and self.weights.head_differs():
            notes.append("the model is tied, so its embedding is the head; the file's other head is ignored")
        if self.adapter is not None:
            notes += self.adapter.notes(self.reference, self.family.names.find)
        return notes

    @property
    def header_notes(self) -> list[str]:
        """Those of `notes` for which no weight has to be read."""
        if self.load_format == "dummy" or not self._source.has_weights:
            return []
        notes = self._source.notes(self.dtype)
        if others := Counter(filter(None, map(self.family.names.other_part, self._tensors.shapes))):
            names = ", ".join(sorted(others))
            notes.append(f"only its text part is read, not {names} ({others.total()} tensors)")
        return notes

    def config_hash(self) -> str:
        """Return a hash of what the spec says."""
        return hashlib.sha256(repr(self.spec).encode()).hexdigest()
