"""GGUF files in the terms of the other formats: config.json's words, canonical names, rows in order."""

__all__ = ["GgufFile"]

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.gguf.architecture import Architecture
from xinfer.models.gguf.architectures import ARCHITECTURES
from xinfer.models.gguf.keys import Keys
from xinfer.models.gguf.layouts import Undo
from xinfer.models.gguf.reader import GgufReader
from xinfer.models.gguf.tokenizer import tokenizer_from_gguf
from xinfer.models.licenses import gguf_license
from xinfer.models.names import Names
from xinfer.models.rope import mscale
from xinfer.models.text.tokenizer import Tokenizer
from xinfer.models.weights import Tensors

Config = dict[str, Any]

_ATTENTION = ("attn_q", "attn_qkv", "attn_output")


class GgufFile:
    """A GGUF checkpoint; what can't be translated is a `ModelError` that names it.

    Args:
        path: the file.
        more: architectures besides those known here.
    """

    def __init__(self, path: Path, more: Iterable[Architecture] = ()) -> None:
        self.path = path
        self._reader = GgufReader(path)
        self._known = {each.name: each for each in (*ARCHITECTURES, *more)}

    has_weights = True
    generation_config: Mapping[str, Any] = MappingProxyType({})  # which this format has no place for

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, or all parts of a checkpoint that is split."""
        return self._reader.files

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file says of itself, in its own words."""
        return self._reader.metadata

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture; one that can't be translated is a `ModelError`."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in self._known:
            raise ModelError(
                f"{self.path}: architecture {name!r} is not supported in GGUF (supported: {', '.join(self._known)})"
            )
        return self._known[name]

    @cached_property
    def _keys(self) -> Keys:
        return Keys(self.path, self.architecture.name, self.metadata, {*self._reader})

    @cached_property
    def config(self) -> Config:
        """The metadata in the words of config.json.

        What a file may leave out: `vocab_size` is the length of the token list, `rope.freq_base` is 10,000.
        """
        architecture, keys = self.architecture, self._keys
        keys.demand("attention.causal", True)
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        heads, layers = architecture.heads(keys), keys.get("block_count")
        if keys.get("nextn_predict_layers", 0):  # those behind the others, to guess further tokens
            layers = keys.integer("block_count") - keys.integer("nextn_predict_layers")
        config = {
            "vocab_size": keys.get("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            "hidden_size": keys.integer("embedding_length"),
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": keys.get("context_length"),
            "tie_word_embeddings": "output.weight" not in keys.tensors,
            "attention_bias": bool({f"blk.0.{name}.bias" for name in _ATTENTION} & keys.tensors),
            "mlp_bias": "blk.0.ffn_up.bias" in keys.tensors,
            **heads,
            **architecture.fixed,
            **{word: keys.get(name) for name, word in architecture.words.items()},
            **{word: keys.get(name) for name, word in architecture.optional.items() if name in keys},
            **self._turned(keys, heads),
            **self._rope(keys),
            **architecture.more(keys),
        }
        kind = architecture.model_type
        config["model_type"] = kind if isinstance(kind, str) else kind(keys)
        keys.check_all_read()
        return config

    def _turned(self, keys: Keys, heads: Config) -> Config:
        """Say how many dimensions of a head turn."""
        whole: int = heads["head_dim"] if "head_dim" in heads else heads["qk_rope_head_dim"]
        turned = keys.integer("rope.dimension_count", whole)
        keys.demand("rope.dimension_count_swa", turned)
        if (word := self.architecture.partial) is None or turned > whole:
            keys.demand("rope.dimension_count", whole, why=": all of a head is expected to turn")
            return {}
        return {word: math.nextafter(turned / whole, 1)}  # so that its product with the whole is not less

    def _rope(self, keys: Keys) -> Config:
        """Translate base and scaling: factors stored as tensors (llama 3.1, phi3), or a kind with a factor."""
        base = keys.get("rope.freq_base", 10_000.0)
        words: Config = {self.architecture.base: base}
        longest = keys.get("context_length")
        original = keys.get("rope.scaling.original_context_length", longest)
        kind = keys.get("rope.scaling.type", "linear")
        factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))  # the second in old files
        amplitude = keys.number("rope.scaling.attn_factor", 1.0)
        scaling: Config = {"rope_type": "default"}
        if "rope_factors_long.weight" in self._reader:
            scaling = {
                "rope_type": "longrope",
                "long_factor": self._factors("rope_factors_long.weight"),
                "short_factor": self._factors("rope_factors_short.weight"),
                "attention_factor": amplitude,
            }
            words["original_max_position_embeddings"] = original
        elif "rope_freqs.weight" in self._reader:
            scaling = {"rope_type": "factors", "factors": self._factors("rope_freqs.weight")}
        elif kind == "yarn":
            scaling = {**self._yarn(keys, factor, amplitude), **self.architecture.turned(keys)}
            scaling["original_max_position_embeddings"] = original
            words["original_max_position_embeddings"] = original
        elif kind != "none" and factor not in (0, 1):
            scaling = {"rope_type": kind, "factor": factor}
        if scaling["rope_type"] not in ("longrope", "yarn"):
            keys.demand("rope.scaling.attn_factor", 1.0)
        if self.architecture.local_base is None or not keys.get("attention.sliding_window", 0):
            keys.demand("rope.freq_base_swa", base)
            return words | {"rope_scaling": scaling}
        local = keys.get("rope.freq_base_swa", self.architecture.local_base(base))
        kinds = {
            "full_attention": {**scaling, "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        return words | {"rope_parameters": kinds}

    def _yarn(self, keys: Keys, factor: float, amplitude: float) -> Config:
        """Translate yarn; `attn_factor` multiplies the usual amplitude, `yarn_attn_factor` is instead of it."""
        keys.demand("rope.scaling.yarn_ext_factor", 1.0)
        scaling: Config = {"rope_type": "yarn", "factor": factor}
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in keys:
                scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
        if multiplier := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
            scaling |= self.architecture.sharpening(multiplier)
            keys.demand("rope.scaling.attn_factor", 1.0)
        elif "rope.scaling.yarn_attn_factor" in keys:
            scaling["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor") * amplitude
        elif amplitude != 1:
            scaling["attention_factor"] = amplitude * mscale(keys.number("rope.scaling.factor", 1.0))
        return scaling

    def _factors(self, name: str) -> list[float]:
        if name not in self._reader:
            raise ModelError(f"{self.path}: the file lacks the tensor {name!r}")
        factors: list[float] = self._reader.load(name).flatten().tolist()
        return factors

    def has_tokenizer(self) -> bool:
        """Whether there is one: always, or the file is damaged."""
        return True

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the metadata, with the chat template."""
        return tokenizer_from_gguf(self.metadata)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: of the sequence and of a turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return tuple(dict.fromkeys(self.metadata[key] for key in keys if key in self.metadata))

    @property
    def license(self) -> tuple[str, str] | None:
        """The licence, and the key that says it."""
        return gguf_license(self.metadata)

    def notes(self, dtype: str) -> list[str]:
        """Return what a user should know of how the file is read: nothing."""
        return []

    def names(self, usual: Names) -> Names:
        """Return how tensors are named: the architecture's way, whatever the family's checkpoints `usual` have."""
        layer = self.architecture.layer
        return Names(self.architecture.top, layer(self._keys) if callable(layer) else layer, "blk")

    def tensors(self, needed: Callable[[str], bool] | None = None) -> Tensors:
        """Return the tensors, dequantized and put in the family's order when read."""
        read = [name for name in self._reader if not self._guesses(name)]
        kinds = {name: self._reader.stored(name) for name in read}
        return Tensors({name: self._shape(name) for name in read}, self._ordered, self.files, kinds)

    def _guesses(self, name: str) -> bool:
        """Whether a tensor is of the layers that guess further tokens, which are not used."""
        guessing, layer = self._keys.get("nextn_predict_layers", 0), re.match(r"blk\.(\d{1,6})\.", name)
        if not guessing or layer is None:
            return False
        last = int(self.config["num_hidden_layers"])
        return last <= int(layer[1]) < last + int(guessing)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._reader.shape(name)
        undo = self._undo(name)
        if undo is None:
            return shape
        try:
            return tuple(undo(torch.empty(shape, device="meta"), self.config).shape)
        except (RuntimeError, IndexError, ZeroDivisionError):  # of a shape that no such tensor has, and that is refused
            return shape

    def _ordered(self, name: str) -> Tensor:
        tensor, undo = self._reader.load(name), self._undo(name)
        return tensor if undo is None else undo(tensor, self.config)

    def _undo(self, name: str) -> Undo | None:
        place = name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") > 1 else name
        undo = self.architecture.undo
        return undo.get(place) or undo.get(place.rpartition(".")[0])
