"""GGUF files in the terms of the other formats: config.json's words, canonical names, rows in order."""

__all__ = ["GgufFile"]

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.gguf_reader import GgufReader
from xinfer.models.names import Names
from xinfer.models.weights import Tensors

# The architectures that can be translated, with the model_type that describes them. Mistral's files say "llama".
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_LAYER = {
    "attn_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
_TOP = {"token_embd": "embed", "output_norm": "norm", "output": "head", "rope_freqs.weight": None}


class GgufFile:
    """A GGUF checkpoint; what can't be translated is a `ModelError` that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = GgufReader(path)

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, or all parts of a checkpoint that is split."""
        return self._reader.files

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file says of itself, in its own words."""
        return self._reader.metadata

    @cached_property
    def architecture(self) -> str:
        """The architecture; one that can't be translated is a `ModelError`."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise ModelError(
                f"{self.path}: architecture {name!r} is not supported in GGUF (supported: {', '.join(_ARCHITECTURES)})"
            )
        return name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The metadata in the words of config.json.

        What a file may leave out: `vocab_size` is the length of the token list, `head_count_kv` is `head_count`,
        `rope.freq_base` 10,000, `attention.key_length` the embedding's share of a head.
        """
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        hidden, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._integer(name, head_dim) != head_dim:
                raise ModelError(f"{self.path}: {name} differs from the {head_dim} of a key, which is not supported")
        config: dict[str, Any] = {
            "model_type": _ARCHITECTURES[self.architecture],
            "vocab_size": self._key("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "max_position_embeddings": self._key("context_length"),
            "head_dim": head_dim,
            "rms_norm_eps": self._key("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._key("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in self._reader,
        }
        if window := self._key("attention.sliding_window", 0):
            config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
            config["model_type"] = "mistral" if self.architecture == "llama" else config["model_type"]
        return config | self._rope()

    def _rope(self) -> dict[str, Any]:
        """Translate rotary scaling: factors stored as a tensor (llama 3.1 and later), or a kind with a factor."""
        if "rope_freqs.weight" in self._reader:
            factors = self._reader.load("rope_freqs.weight").flatten().tolist()
            return {"rope_scaling": {"rope_type": "factors", "factors": factors}}
        kind = self._key("rope.scaling.type", "linear")
        factor = self._key("rope.scaling.factor", self._key("rope.scale_linear", 1.0))  # the second in old files
        if kind == "none" or (kind == "linear" and factor in (0, 1)):
            return {}
        return {"rope_scaling": {"rope_type": kind, "factor": factor}}

    def _key(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list):  # one number a layer
            if not value or any(other != value[0] for other in value):
                raise ModelError(f"{self.path}: {self.architecture}.{name} differs between layers, not supported")
            value = value[0]
        if value is None:
            raise ModelError(f"{self.path}: the metadata lacks {self.architecture}.{name}")
        return value

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._key(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(
                f"{self.path}: {self.architecture}.{name}={value!r}, but a whole number above 0 is expected"
            )
        return value

    @property
    def names(self) -> Names:
        """From its names of tensors to the canonical ones."""
        return Names(_TOP, _LAYER, "blk")

    def tensors(self) -> Tensors:
        """Return the tensors, dequantized when read, llama's queries and keys put in order."""
        shapes = {name: self._reader.shape(name) for name in self._reader}
        return Tensors(shapes, self._ordered, self.files, {name: self._reader.stored(name) for name in shapes})

    def _ordered(self, name: str) -> Tensor:
        tensor = self._reader.load(name)
        if self.architecture == "llama" and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", name)):
            key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            return _half_split(tensor, self.config[key])
        return tensor


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's interleaving of the two halves of each head's rows."""
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
