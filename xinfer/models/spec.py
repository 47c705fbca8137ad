"""A decoder described once, as data, before any backend touches it."""

__all__ = ["AttentionSpec", "DecoderSpec", "ExpertsSpec", "LatentSpec", "LayerSpec", "MlpSpec", "NormSpec", "RopeSpec"]

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from xinfer.models.layers import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, MlpSpec, NormSpec
from xinfer.models.rope import RopeSpec
from xinfer.models.shapes import layer_shapes, norm_shapes


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder: embedding, layers, a last norm, a head.

    Attributes:
        family: which family described it.
        vocab_size, hidden_size: shape of the embedding.
        max_model_len: longest context that it was made for; see also `default_len`.
        tied: whether the head is the embedding.
        layers: from first to last.
        norm: the last one.
        embed_scale: factor on embeddings.
        learned_positions: rows of a table that is added to embeddings; 0 for none.
        head_bias: whether the head has biases.
        logit_scale: factor on logits.
        logit_softcap: c in c * tanh(logit / c), after that.
        guessing_layers: layers that a checkpoint has behind these, to guess further tokens; they are not read.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    tied: bool
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    embed_scale: float = 1.0
    learned_positions: int = 0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    guessing_layers: int = 0

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every weight under its canonical name, with its shape; a projection is [out, in], experts' are stacked."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        if self.learned_positions:
            shapes["positions.weight"] = (self.learned_positions, hidden)
        kinds = {layer: dict(layer_shapes(layer, hidden)) for layer in dict.fromkeys(self.layers)}
        for i, layer in enumerate(self.layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in kinds[layer].items()}
        shapes |= norm_shapes("norm", self.norm, (hidden,))
        if not self.tied:
            shapes["head.weight"] = (self.vocab_size, hidden)
        if self.head_bias:
            shapes["head.bias"] = (self.vocab_size,)
        return shapes

    def keeps_precision(self, name: str) -> bool:
        """Whether a tensor is float32 in any precision: what chooses experts, and norms whose factors are 1 + w."""
        if ".mlp.router." in name:
            return True
        if not name.endswith(("norm.weight", "norm.bias")):
            return False
        if not name.startswith("layers."):
            return self.norm.offset != 0
        _, layer, *_ = name.split(".")
        return any(norm is not None and norm.offset != 0 for norm in self.layers[int(layer)].norms)

    def context_len(self, wanted: int | None) -> int:
        """Return how many tokens a sequence may have in a run that asks for so many."""
        return min(self.max_model_len, wanted or self.default_len)

    @property
    def default_len(self) -> int:
        """Longest context of a run that asks for none: where longer ones turn all positions otherwise, the shorter."""
        ropes = [layer.attention.rope for layer in self.layers]
        changes = [rope.original_max_len for rope in ropes if rope is not None and rope.depends_on_length]
        return min([self.max_model_len, *changes])

    @property
    def parameters(self) -> int:
        """Numbers learned, a tied head counted once."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    def weight_bytes(self, element: int) -> int:
        """Return the bytes of all weights in a precision of so many bytes a number, what keeps float32 in that."""
        sizes = ((name, math.prod(shape)) for name, shape in self.tensors.items())
        return sum(size * (4 if self.keeps_precision(name) else element) for name, size in sizes)

    @property
    def step_read_parameters(self) -> int:
        """Weights that a decode step of one sequence reads; see `step_read`."""
        return self.step_read(lambda _, shape: math.prod(shape))

    def step_read(self, size: Callable[[str, tuple[int, ...]], int]) -> int:
        """Return how much of the weights a decode step of one sequence reads, where `size` tells a tensor's.

        That is all, but of experts those chosen, and of tables of which it needs one row nothing.
        """
        total = 0
        for name, shape in self.tensors.items():
            if name == "positions.weight" or (name == "embed.weight" and not self.tied):
                continue
            part, of = 1, 1
            if ".mlp.experts." in name and (experts := self.layers[int(name.split(".")[1])].mlp.experts) is not None:
                part, of = experts.chosen, experts.count
            total += size(name, shape) * part // of
        return total

    @property
    def kv_token_elements(self) -> int:
        """Numbers that one token leaves in the KV cache, over all layers."""
        return sum(layer.attention.cache_width for layer in self.layers)
