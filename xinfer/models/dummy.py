"""Models without a checkpoint, for benchmarks: random weights of any config, and a tokenizer where there is none."""

__all__ = ["byte_tokenizer", "dummy_weights"]

import math

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from xinfer.models.spec import DecoderSpec
from xinfer.models.text.tokenizer import Tokenizer
from xinfer.models.weights import Tensors


def dummy_weights(spec: DecoderSpec, seed: int) -> Tensors:
    """Return random weights for a spec, scaled so that activations stay sound; norms, biases and sinks do nothing.

    Each tensor depends on the seed and its place alone, not on the order in which they are asked for.
    """
    places = {name: i for i, name in enumerate(spec.tensors)}

    def load(name: str) -> Tensor:
        shape = spec.tensors[name]
        if "norm." in name and name.endswith(".weight"):
            return torch.zeros(shape) if spec.keeps_precision(name) else torch.ones(shape)
        if len(shape) == 1 or name.endswith(".bias"):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed((seed << 20) + places[name])
        scale = 1.0 if name == "embed.weight" and not spec.tied else 1 / math.sqrt(shape[-1])
        return torch.empty(shape).normal_(0, scale, generator=generator)

    return Tensors(dict(spec.tensors), load, ())


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are the bytes of a text, in UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte)
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def _byte(letter: str) -> int:
    """Return the byte that a letter of GPT-2's alphabet stands for: itself if it prints, else counted from 256 on."""
    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\xa1"), ord("\xac") + 1),
        *range(ord("\xae"), ord("\xff") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printing]
    return ord(letter) if ord(letter) in printing else others[ord(letter) - 256]
