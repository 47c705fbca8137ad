"""The decoder's steps as compiled graphs: exported, compiled ahead of time, kept in the cache folder.

There are two: a single token, for which everything but its context has a known shape, and any other step. Neither can
meet a shape that it was not made for, so nothing is ever compiled again; and a graph in the cache is loaded without
being traced, in milliseconds. What computes is one function in C++, from token ids to logits, that calls the
operators of `kernels`; weights are the decoder's own, not copies.
"""

__all__ = ["Graphs"]

import ctypes
import hashlib
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.export import Dim

from xinfer.backends.torch.attention import CpuStep
from xinfer.backends.torch.decoder import Decoder, Turns
from xinfer.backends.torch.kernels import build_key
from xinfer.backends.torch.rotary import Turn
from xinfer.models.cache import cache_folder

log = logging.getLogger(__name__)

Run = Callable[..., list[Tensor]]
_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else up to eight numbers, as of sinks, are those of whoever compiled it
}
_LEAST = 2  # of whatever may vary: torch takes 1 for something special


def _filled(x: Tensor, dim: int, least: int = _LEAST, value: int | None = None) -> Tensor:
    """Return x with at least so many places along a dimension: more of the last one, or of `value`."""
    missing = least - x.shape[dim]
    if missing <= 0:
        return x
    more = [1] * x.ndim
    more[dim] = missing
    rest = x.narrow(dim, -1, 1).repeat(more) if value is None else x.new_full(more, value)
    return torch.cat([x, rest], dim)


def _lent(weight: Tensor) -> Tensor:
    """Return a tensor over the same memory, on the CPU, that does not hold it.

    A graph never lets go of the tensors that it was given (torch 2.13: of a `MaybeOwningAtenTensorHandle` for what is
    user-managed, nobody deletes the handle), so it would keep the weights of every runner that was closed.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    memory = (ctypes.c_byte * (extent * weight.element_size())).from_address(weight.data_ptr())
    return torch.frombuffer(memory, dtype=weight.dtype).as_strided(weight.shape, weight.stride())


class Graphs:
    """Both graphs of a model, loaded from the cache folder, compiled now if they are not there.

    Args:
        model: whose steps they are.
        pools: its caches.
        block_size: slots of a block.
    """

    def __init__(self, model: Decoder, pools: list[Tensor], block_size: int) -> None:
        self._model, self._pools, self._block_size = model, pools, block_size
        self._key = _key(model, pools, block_size)
        self._weights = {
            f"model.{name}": weight.data for name, weight in model.named_parameters(remove_duplicate=False)
        }
        self._single, self._several = self._load(single=True), self._load(single=False)

    def __call__(self, token_ids: Tensor, positions: Tensor, step: CpuStep) -> Tensor:
        """Return float32 logits [K, vocabulary] of the tokens `step.sample_at`; ids and positions are [T]."""
        wanted = len(token_ids) if step.sample_at is None else len(step.sample_at)
        turns = flat_turns(self._model.turns(positions, step.longest))
        if len(token_ids) == 1:
            rest = [step.query_starts, step.context_lens, _filled(step.block_tables, 1)]
            return self._single([token_ids, positions, step.slots, *rest, *turns, *self._pools])[0][:wanted]
        sample_at = torch.arange(wanted, dtype=torch.int32) if step.sample_at is None else step.sample_at
        starts, contexts = _filled(step.query_starts, 0, _LEAST + 1), _filled(step.context_lens, 0, value=0)
        rest = [starts, contexts, _filled(_filled(step.block_tables, 1), 0), _filled(sample_at, 0, value=0)]
        return self._several([token_ids, positions, step.slots, *rest, *turns, *self._pools])[0][:wanted]

    def _load(self, *, single: bool) -> Run:
        """Return a graph that computes with the model's own weights."""
        file = cache_folder() / "torch" / "graphs" / f"{self._key}-{'single' if single else 'several'}.pt2"
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                self._make(file, single)
        graph = torch._inductor.aoti_load_package(str(file), run_single_threaded=True)
        names = graph.get_constant_fqns()
        lent = {name: _lent(self._weights[name]) for name in names}
        graph.load_constants(lent, check_full_update=True, user_managed=True)
        return graph.loader.boxed_run

    def _make(self, file: Path, single: bool) -> None:
        """Compile a graph."""
        name = "1 of 2, for single tokens," if single else "2 of 2, for several tokens,"
        log.warning("graph %s is compiled; this takes up to a minute, once", name)
        started = perf_counter()
        traced, scratch_folder = _Traced(self._model, self._block_size), tempfile.TemporaryDirectory(dir=file.parent)
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), scratch_folder as scratch:
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of itself
            arguments, shapes = self._example(single)
            exported = torch.export.export(traced, arguments, dynamic_shapes=shapes)
            made = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(Path(scratch, "graph.pt2")), inductor_configs=_OPTIONS
            )
            Path(made).replace(file)
        log.warning("graph %s took %.0f s", name, perf_counter() - started)

    def _example(self, single: bool) -> tuple[tuple[Any, ...], Any]:
        """Return what a graph is traced with, and which dimensions may be others."""
        count = 1 if single else 4
        positions = torch.arange(count, dtype=torch.int32)
        slots, blocks = torch.arange(count), torch.zeros(1 if single else 2, 3, dtype=torch.int32)
        starts, contexts = ([0, 1], [1]) if single else ([0, count, count], [count, 0])
        some = [torch.tensor(each, dtype=torch.int32) for each in (starts, contexts)]
        sampled = None if single else positions[:2]
        turns = flat_turns(self._model.turns(positions, count))
        pools = [torch.zeros(2 * self._block_size, pool.shape[1], dtype=pool.dtype) for pool in self._pools]
        arguments = (positions.long(), positions, slots, *some, blocks, sampled, turns, pools)
        token, blocks_dim = None if single else {0: Dim("tokens", min=_LEAST)}, Dim("blocks", min=_LEAST)
        rows = None if single else Dim("sequences", min=_LEAST)
        return arguments, (
            *(token, token, token),
            *((None, None) if single else ({0: Dim("starts", min=_LEAST)}, {0: rows})),
            {1: blocks_dim} if single else {0: rows, 1: blocks_dim},
            None if single else {0: Dim("sampled", min=_LEAST)},
            [token] * len(turns),
            [{0: Dim("slots", min=_LEAST)}] * len(self._pools),
        )


def _key(model: Decoder, pools: list[Tensor], block_size: int) -> str:
    """Return a hash of all that a graph depends on; code that it is traced from is this folder's."""
    weights = [(name, tuple(each.shape), each.dtype) for name, each in model.named_parameters()]
    kept, shared = [pool.dtype for pool in pools], getattr(model.head, "widths", None)
    digest = hashlib.sha256(repr((model.spec, weights, kept, shared, block_size, build_key())).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


class _Traced(nn.Module):
    """A step as a function of tensors alone."""

    def __init__(self, model: Decoder, block_size: int) -> None:
        super().__init__()
        self.model, self._block_size = model, block_size
        self._ropes = list(dict.fromkeys(layer.attention.rope for layer in model.spec.layers))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        sample_at: Tensor | None,
        turns: list[Tensor],
        pools: list[Tensor],
    ) -> Tensor:
        """Return logits [K, vocabulary]."""
        step = CpuStep(slots, sample_at, 0, query_starts, context_lens, block_tables, self._block_size)
        return self.model.compute(token_ids, positions, self._turns(turns), pools, step)

    def _turns(self, flat: list[Tensor]) -> Turns:
        left, turns = iter(flat), {}
        for rope in self._ropes:
            if rope is not None:
                cos, sin = next(left), next(left)
                turns[rope] = Turn(cos, sin, rope.interleaved, next(left) if rope.query_growth else None)
        return turns


def flat_turns(turns: Turns) -> list[Tensor]:
    """Return turns as a graph takes them."""
    return [each for turn in turns.values() for each in (turn.cos, turn.sin, turn.growth) if each is not None]
