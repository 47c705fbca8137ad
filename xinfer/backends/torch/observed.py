"""The inputs of a model's matrices, told layer by layer: each is computed by itself, in float32, on a text.

So of a model that is rounded because it is large no more than a layer need be in memory as it was.
"""

__all__ = ["observed"]

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from xinfer.backends.torch.attention import Prefill, Step
from xinfer.backends.torch.decoder import Decoder, Layer
from xinfer.backends.torch.linear import Joined, Linear
from xinfer.backends.torch.load import Load
from xinfer.backends.torch.rotary import Rotary
from xinfer.models.model import Model
from xinfer.models.reader import Reader
from xinfer.models.windows import windows

_WINDOW = 512  # tokens of a window, or what the model can take

# Of which matrices a layer's modules are made; experts, of which each sees other tokens, are left out.
_SOURCES = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.q_a": ("attn.q_a",),
    "attn.q": ("attn.q", "attn.q_b"),
    "attn.kv_a": ("attn.kv_a",),
    "attn.o": ("attn.o",),
    "mlp.up": ("mlp.gate", "mlp.up"),
    "mlp.down": ("mlp.down",),
    "mlp.shared.up": ("mlp.shared.gate", "mlp.shared.up"),
    "mlp.shared.down": ("mlp.shared.down",),
}


def observed(model: Model) -> Iterator[dict[str, Tensor]]:
    """Yield for each layer, and then for the head, what its matrices multiply.

    That is the mean of x' x over inputs x [1, in] of the text, [in, in] float32, by the matrix's canonical name.
    """
    spec = model.spec
    size = min(_WINDOW, spec.max_model_len)
    texts = [torch.from_numpy(tokens).long() for tokens in windows(model, size)]
    cpu = torch.device("cpu")
    with torch.no_grad(), Reader(model.weights, cpu, torch.float32) as reader:
        ends = Decoder(replace(spec, layers=()), Load(reader.load), spec.max_model_len, torch.float32, cpu)
        positions = torch.arange(size)
        hidden = [ends.embedded(tokens, positions) for tokens in texts]
        for index, layer in enumerate(spec.layers):
            module = Layer(layer, spec.hidden_size, lambda f, x: f(x), Load(reader.load, prefix=f"layers.{index}."))
            sums: dict[str, Tensor] = {}
            parts = dict(module.named_modules())
            for name, sources in _SOURCES.items():
                if isinstance(found := parts.get(name), Linear | Joined):
                    told = [f"layers.{index}.{source}.weight" for source in sources]
                    found.register_forward_pre_hook(
                        partial(_add, sums, [each for each in told if each in spec.tensors])
                    )
            rope, step = layer.attention.rope, _alone(size)
            turn = (
                None
                if rope is None
                else Rotary(rope, spec.max_model_len, torch.float32, positions.device).at(positions, size)
            )
            pool = torch.empty(size, layer.attention.cache_width)
            hidden = [module(x, turn, pool, step) for x in hidden]
            yield {name: total / (size * len(texts)) for name, total in sums.items()}
        inputs = torch.cat([ends.norm(x) for x in hidden])
        yield {"embed.weight" if spec.tied else "head.weight": inputs.T @ inputs / len(inputs)}


def _alone(size: int) -> Step:
    """Return the step of a whole text, of which nothing is in the cache."""
    return Step(torch.arange(size), None, size, None, (Prefill(0, size, size, None),))


def _add(sums: dict[str, Tensor], names: list[str], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Add what a module multiplies to the sums of its matrices, which are one."""
    product = inputs[0].T @ inputs[0]
    for name in names:
        sums[name] = sums[name] + product if name in sums else product
