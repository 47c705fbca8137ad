"""A model's decoder made: its weights read, rounded, shared out or streamed, as is asked for."""

__all__ = ["Loaded", "held_bytes", "load"]

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from xinfer.backends.torch.codes import Codes
from xinfer.backends.torch.decoder import Decoder
from xinfer.backends.torch.load import Get, Load
from xinfer.backends.torch.parallel import Gathered, Ranks, Summed
from xinfer.backends.torch.pinned import sending
from xinfer.backends.torch.quantized import quantized
from xinfer.backends.torch.streaming import StreamPlan, reading_anew
from xinfer.errors import ConfigError, DeviceError
from xinfer.hardware import available_memory, gibibytes
from xinfer.models.mapped_file import copied
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme
from xinfer.models.reader import Reader
from xinfer.models.split import Share

log = logging.getLogger(__name__)

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoder, and what it takes.

    Attributes:
        resident_bytes: of weights that are in memory.
        step_read_bytes: that a decode step reads.
        stream: how layers are streamed.
    """

    decoder: Decoder
    resident_bytes: int
    step_read_bytes: int
    stream: StreamPlan


def load(
    model: Model,
    ranks: Ranks | None,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    invariant: bool,
    pinned_memory: float = 0,
) -> Loaded:
    """Return a model's decoder, or this process's share of it; one that does not fit is a `DeviceError`.

    `pinned_memory` is for layers that are streamed to a CUDA device, see `EagerConfig`.
    """
    started, scheme = perf_counter(), model.quantization
    share = None if ranks is None else Share(model.spec, ranks.rank, ranks.count)
    spec = model.spec if share is None else share.spec
    size = partial(_stored_bytes, scheme, dtype.itemsize)
    stream = StreamPlan.of(spec, model.stream_layers, size)
    total = sum(size(name, shape) for name, shape in spec.tensors.items())
    _check_fits(total - stream.bytes + stream.turning_bytes, device)
    room = _room(pinned_memory, streams=stream.slots > 0 and device != _HOST)
    codes = _codes(model, scheme, ranks)
    make = partial(Decoder, spec, max_len=longest, dtype=dtype, device=device, invariant=invariant)
    plain = [name for name in model.weights if name not in codes]
    with torch.no_grad():
        if stream.slots:
            with copied():
                get, read = (_shared(reading_anew(model.weights, d, dtype), codes, share, d) for d in (device, _HOST))
                again = None if device == _HOST else sending(get, read, device, room)
                decoder = make(Load(get, again=again), slots=stream.slots)
        else:
            with Reader(model.weights, device, dtype, plain) as reader:
                decoder = make(Load(_shared(reader.load, codes, share, device)))
    if share is not None:
        decoder.change(_sum_up)
        decoder.head = Gathered(decoder.head.rows(*share.vocabulary), share)
    resident = held_bytes(decoder) + stream.turning_bytes
    log.info(
        "weights on the device",
        extra={"seconds": perf_counter() - started, "bytes": resident, "device": str(device)},
    )
    reads = spec.step_read(size)
    if share is not None:
        head = "embed.weight" if spec.tied else "head.weight"
        start, end = share.vocabulary
        reads -= size(head, spec.tensors[head]) * (spec.vocab_size - end + start) // spec.vocab_size
    return Loaded(decoder, resident, reads, stream)


def _codes(model: Model, scheme: Scheme | None, ranks: Ranks | None) -> Mapping[str, Codes]:
    if scheme is None:
        return {}
    make = partial(quantized, model, scheme, list(model.spec.tensors))
    return make() if ranks is None else ranks.in_turn(make)


def _shared(read: Get, codes: Mapping[str, Codes], share: Share | None, device: torch.device) -> Get:
    """Return what returns a weight or codes, or this process's part of them."""

    def get(name: str) -> Tensor | Codes:
        if name not in codes:
            return read(name) if share is None else share.of(name, read(name))
        whole = codes[name].to(device)
        place = None if share is None else share.where(name)
        if place is None or share is None:
            return whole
        if (part := whole.narrow(*place)) is None:
            raise ConfigError(
                f"parallel.tensor={share.count} cuts {name} within blocks of inputs that share a scale: take a smaller "
                "model.quantization_block, or fewer processes"
            )
        return part

    return get


def _sum_up(layer: Any) -> None:
    layer.attn, layer.mlp = Summed(layer.attn), Summed(layer.mlp)


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights, where some are views of others."""
    held = end = 0
    places = []
    for weight in model.parameters():
        size = weight.numel() * weight.element_size()
        if weight.layout is torch.strided:
            places.append((weight.data_ptr(), size))
        else:  # oneDNN's, of which nothing is a view
            held += size
    for place, size in sorted(places, key=lambda each: (each[0], -each[1])):
        held += size if place >= end else 0
        end = max(end, place + size)
    return held


def _stored_bytes(scheme: Scheme | None, element: int, name: str, shape: tuple[int, ...]) -> int:
    own = None if scheme is None else scheme.of(name, shape)
    return element * math.prod(shape) if own is None else own.nbytes(shape)


def _room(wanted: float, *, streams: bool) -> int:
    """Return the bytes of pinned memory that streamed layers may stay in."""
    if wanted and not streams:
        raise ConfigError(
            f"backend.pinned_memory={wanted:g} is for layers that come to a CUDA device from the host, and none do: "
            "leave it out (0), or take model.stream_layers and a CUDA device"
        )
    if wanted < 0:
        raise ConfigError(f"backend.pinned_memory={wanted:g} is out of range: bytes, or a share of what is free")
    free = available_memory(_HOST)
    return int(free * wanted if wanted <= 1 else min(wanted, free))


def _check_fits(weight_bytes: int, device: torch.device) -> None:
    free = available_memory(device)
    if weight_bytes > free:
        raise DeviceError(
            f"the weights take {gibibytes(weight_bytes)}, but {device} has {gibibytes(free)} free: "
            "take a smaller precision (model.dtype=bfloat16) or a smaller model"
        )
