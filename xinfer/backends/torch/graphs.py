"""The decoder's steps as compiled graphs: exported, compiled ahead of time, kept in the cache folder.

There are two: a single token, for which everything but its context has a known shape, and any other step. Neither can
meet a shape that it was not made for, so nothing is ever compiled again; and a graph in the cache is loaded without
being traced, in milliseconds. What computes is one function in C++, from token ids to logits, that calls the
operators of `kernels`; weights are the decoder's own, not copies.
"""

__all__ = ["Graphs"]

import hashlib
import logging
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.export import Dim

from xinfer.backends.torch.decoder import Decoder, Turns
from xinfer.backends.torch.kernels import build_key
from xinfer.backends.torch.lent import lent
from xinfer.backends.torch.paged import Kernels, PagedStep
from xinfer.backends.torch.rotary import Turn
from xinfer.models.cache import cache_folder

log = logging.getLogger(__name__)

Run = Callable[..., list[Tensor]]
_ALWAYS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else up to eight numbers, as of sinks, are those of whoever compiled it
}
# A CUDA device's are gpt-fast's; vLLM tunes products for the sizes that it is told, which takes minutes. Not measured.
_OPTIONS = {"cpu": _ALWAYS, "cuda": {**_ALWAYS, "coordinate_descent_tuning": True}}
_TOKENS = {"cpu": 4, "cuda": 256}  # of the step that a graph is traced with, for which a device's loops are tuned
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


def _lengths(step: PagedStep) -> list[Tensor]:
    """Return what says where sequences lie, of at least two with two blocks: empty ones beside those that there are."""
    sequences, tables = len(step.context_lens), _filled(step.block_tables, 1)
    if sequences >= _LEAST:
        return [step.query_starts, step.context_lens, tables, step.host]
    starts, contexts = _filled(step.query_starts, 0, _LEAST + 1), _filled(step.context_lens, 0, value=0)
    host = [step.host[:2], _filled(step.host[2 : 3 + sequences], 0, _LEAST + 1)]
    host.append(_filled(step.host[3 + sequences :], 0, value=0))
    return [starts, contexts, _filled(tables, 0), torch.cat(host)]


class Graphs:
    """Both graphs of a model, loaded from the cache folder, compiled now if they are not there.

    Args:
        model: whose steps they are.
        pools: caches like those that they will be called with.
        block_size: slots of a block.
        kernels: what computes each kind of attention.
    """

    def __init__(self, model: Decoder, pools: list[Tensor], block_size: int, kernels: Kernels) -> None:
        self._model, self._like, self._block_size, self._kernels = model, pools, block_size, kernels
        self._device = pools[0].device
        self._key = _key(model, pools, block_size, kernels)
        self._weights = {
            f"model.{name}": weight.data for name, weight in model.named_parameters(remove_duplicate=False)
        }
        self._single, self._several = self._load(single=True), self._load(single=False)

    def __call__(self, token_ids: Tensor, positions: Tensor, step: PagedStep, pools: list[Tensor]) -> Tensor:
        """Return float32 logits [K, vocabulary] of the tokens `step.sample_at`; ids and positions are [T]."""
        wanted = len(token_ids) if step.sample_at is None else len(step.sample_at)
        turns = flat_turns(self._model.turns(positions, step.longest))
        if len(token_ids) == 1:
            run, lengths = (
                self._single,
                [step.query_starts, step.context_lens, _filled(step.block_tables, 1), step.host],
            )
        else:
            rows = step.sample_at
            rows = torch.arange(wanted, dtype=torch.int32, device=self._device) if rows is None else rows
            run, lengths = self._several, [*_lengths(step), _filled(rows, 0, value=0)]
        with self._current():
            return run([token_ids, positions, step.slots, *lengths, *turns, *pools])[0][:wanted]

    def _current(self) -> AbstractContextManager[object]:
        """Make the graphs' device the current one, on whose stream they are run, whichever thread this is."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _load(self, *, single: bool) -> Run:
        """Return a graph that computes with the model's own weights.

        A graph never lets go of the tensors that it was given (torch 2.13: of a `MaybeOwningAtenTensorHandle` for what
        is user-managed, nobody deletes the handle), so they are lent: else the weights of every runner that was closed
        would be kept.
        """
        file = cache_folder() / "torch" / "graphs" / f"{self._key}-{'single' if single else 'several'}.pt2"
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                self._make(file, single)
        index = -1 if self._device.index is None else self._device.index
        graph = torch._inductor.aoti_load_package(str(file), run_single_threaded=True, device_index=index)
        weights = {name: lent(self._weights[name]) for name in graph.get_constant_fqns()}
        graph.load_constants(weights, check_full_update=True, user_managed=True)
        return graph.loader.boxed_run

    def _make(self, file: Path, single: bool) -> None:
        """Compile a graph."""
        name = "1 of 2, for single tokens," if single else "2 of 2, for several tokens,"
        log.warning("graph %s is compiled; this takes up to a minute, once", name)
        started = perf_counter()
        traced = _Traced(self._model, self._block_size, self._kernels)
        scratch_folder = tempfile.TemporaryDirectory(dir=file.parent)
        modes = (torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), self._current())
        with ExitStack() as stack, scratch_folder as scratch:
            for mode in modes:
                stack.enter_context(mode)
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of itself
            arguments, shapes = self._example(single)
            exported = torch.export.export(traced, arguments, dynamic_shapes=shapes)
            options = dict(_OPTIONS[self._device.type])  # torch writes into what it is given
            made = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(Path(scratch, "graph.pt2")), inductor_configs=options
            )
            Path(made).replace(file)
        log.warning("graph %s took %.0f s", name, perf_counter() - started)

    def _example(self, single: bool) -> tuple[tuple[Any, ...], Any]:
        """Return what a graph is traced with, and which dimensions may be others."""
        count = 1 if single else _TOKENS[self._device.type]
        starts, contexts = ([0, 1], [1]) if single else ([0, count, count], [count, 0])
        host = torch.tensor([count, count, *starts, *contexts], dtype=torch.int32)
        with self._device:
            positions = torch.arange(count, dtype=torch.int32)
            slots, blocks = torch.arange(count), torch.zeros(len(contexts), 3, dtype=torch.int32)
            some = [torch.tensor(each, dtype=torch.int32) for each in (starts, contexts)]
            pools = [torch.zeros(2 * self._block_size, pool.shape[1], dtype=pool.dtype) for pool in self._like]
            turns = flat_turns(self._model.turns(positions, count))
        sampled = None if single else positions[: count // 2]
        arguments = (positions.long(), positions, slots, *some, blocks, host, sampled, turns, pools)

        tokens, sequences, width, sample = (Dim(n, min=_LEAST) for n in ("tokens", "sequences", "blocks", "sampled"))

        def varies(dim: Any) -> dict[int, Any] | None:
            return None if single else {0: dim}

        token = varies(tokens)
        return arguments, (
            *(token, token, token),
            *(varies(sequences + 1), varies(sequences)),
            {1: width} if single else {0: sequences, 1: width},
            varies(2 * sequences + 3),
            varies(sample),
            [token] * len(turns),
            [{0: Dim("slots", min=_LEAST * self._block_size)}] * len(pools),
        )


def _key(model: Decoder, pools: list[Tensor], block_size: int, kernels: Kernels) -> str:
    """Return a hash of all that a graph depends on; code that it is traced from is this folder's."""
    weights = [(name, tuple(each.shape), each.dtype) for name, each in model.named_parameters()]
    kept, shared = [pool.dtype for pool in pools], getattr(model.head, "widths", None)
    computing = [kernels[layer.attention] for layer in model.spec.layers]
    made = (model.spec, weights, kept, shared, block_size, computing, _OPTIONS, build_key())
    digest = hashlib.sha256(repr((made, _architecture(pools[0].device))).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _architecture(device: torch.device) -> tuple[Any, ...]:
    """Return what a device's code depends on."""
    if device.type == "cpu":
        return ("cpu",)
    return (torch.version.cuda, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


class _Traced(nn.Module):
    """A step as a function of tensors alone."""

    def __init__(self, model: Decoder, block_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.model, self._block_size, self._kernels = model, block_size, kernels
        self._ropes = list(dict.fromkeys(layer.attention.rope for layer in model.spec.layers))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        host: Tensor,
        sample_at: Tensor | None,
        turns: list[Tensor],
        pools: list[Tensor],
    ) -> Tensor:
        """Return logits [K, vocabulary]."""
        step = PagedStep(
            *(slots, sample_at, 0, query_starts, context_lens, block_tables, self._block_size),
            host=host,
            single=token_ids.shape[0] == 1,
            kernels=self._kernels,
        )
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
