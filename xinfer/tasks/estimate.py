"""What a model needs of a machine, computed from its spec: memory, and the least time that steps can take."""

__all__ = ["Decode", "Entry", "Memory", "Prefill", "activation_bytes", "decode_floor", "memory", "prefill_floor"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xinfer.engine.types import Limits
from xinfer.hardware import Speed
from xinfer.models.layers import AttentionSpec
from xinfer.models.parts import Part
from xinfer.models.spec import DecoderSpec, LayerSpec

Entry = Callable[[AttentionSpec], int]  # to the bytes that a token leaves in the cache of a layer

_OF_LAYERS = ("attention", "feed-forward", "router", "experts", "norms")


@dataclass(frozen=True, slots=True)
class Memory:
    """What so many sequences of so many tokens take, in bytes, and what else would fit.

    Attributes:
        max_num_seqs, max_model_len: what was asked for.
        weight_bytes: in the precision to compute in, with what a device holds twice.
        kv_cache_bytes: keys and values of all tokens of all sequences.
        activation_bytes: about what a step needs besides, see `activation_bytes`.
        free_bytes: what the device has left now.
        largest_max_num_seqs, largest_max_model_len: how many sequences of that length would fit, and how long that
            many could be (no longer than the model's context); 0 if none.
    """

    max_num_seqs: int
    max_model_len: int
    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    free_bytes: int
    largest_max_num_seqs: int
    largest_max_model_len: int

    @property
    def total_bytes(self) -> int:
        """All together."""
        return self.weight_bytes + self.kv_cache_bytes + self.activation_bytes


def memory(spec: DecoderSpec, limits: Limits, dtype: torch.dtype, entry: Entry, free: int) -> Memory:
    """Return what `limits` asks for, on a device with so many bytes free."""
    length, sequences = spec.context_len(limits.max_model_len), limits.max_num_seqs
    weights, token = spec.weight_bytes(dtype.itemsize), sum(entry(layer.attention) for layer in spec.layers)
    activations = activation_bytes(spec, limits, dtype.itemsize)
    tokens = max(0, free - weights - activations) // token
    return Memory(
        max_num_seqs=sequences,
        max_model_len=length,
        weight_bytes=weights,
        kv_cache_bytes=sequences * length * token,
        activation_bytes=activations,
        free_bytes=free,
        largest_max_num_seqs=tokens // length,
        largest_max_model_len=min(tokens // sequences, spec.max_model_len),
    )


def activation_bytes(spec: DecoderSpec, limits: Limits, element: int) -> int:
    """Return about what a step holds besides weights and cache: a bound for a plain decoder, without attention scores.

    For each of its tokens four vectors as wide as the model, and the wider of attention (queries, keys, values and
    what is found) and the feed-forward part (what goes in and out of its activation, for each expert chosen); and
    logits, once as they were computed and once in float32.
    """
    tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * spec.context_len(limits.max_model_len))
    widest = max(_width(layer) for layer in dict.fromkeys(spec.layers))
    logits = limits.logits_rows * spec.vocab_size * (element + 4)
    return tokens * (4 * spec.hidden_size + widest) * element + logits


def _width(layer: LayerSpec) -> int:
    attention, mlp = layer.attention, layer.mlp
    found = attention.heads * (attention.head_dim + attention.value_dim)
    copies = 1 if mlp.experts is None else mlp.experts.chosen
    shared = 0 if mlp.experts is None else mlp.experts.shared or 0
    return max(found + attention.cache_width, (mlp.size * copies + shared) * (3 if mlp.gated else 2))


@dataclass(frozen=True, slots=True)
class Decode:
    """The least time of a step in which so many sequences, with so many tokens each in the cache, get a token more.

    It is `read_bytes` over the bandwidth. Windows are read as far as they reach; of experts, no more than one
    sequence's choice is counted, for all might choose the same.
    """

    num_seqs: int
    tokens: int
    read_bytes: int
    floor_ms: float
    tok_s: float


def decode_floor(spec: DecoderSpec, element: int, num_seqs: int, tokens: int, speed: Speed, entry: Entry) -> Decode:
    """Return the floor of a decode step: the roofline of a run, but that windows are not taken for whole contexts."""
    attentions = [layer.attention for layer in spec.layers]
    cached = sum(entry(each) * min(tokens, each.window or tokens) for each in attentions)
    read = spec.step_read_parameters * element + num_seqs * cached
    seconds = read / speed.read_bytes_s
    return Decode(num_seqs, tokens, read, seconds * 1e3, num_seqs / seconds)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The least time for a token of a prompt: operations over what matrix products reach.

    Two operations for each parameter of the layers that a token needs. Not counted are the head, which only the last
    token of a prompt needs, and attention's scores, which grow with its length.
    """

    flop_per_token: int
    floor_ms_per_token: float
    tok_s: float


def prefill_floor(model: Sequence[Part], flop_s: float) -> Prefill:
    """Return the floor of a prompt's token."""
    operations = 2 * sum(part.active_parameters for part in model if part.name in _OF_LAYERS)
    return Prefill(operations, operations / flop_s * 1e3, flop_s / operations)
