"""One call of a graph: the cache's rows bound to it, what it is told, and where its logits go."""

__all__ = ["Calls"]

from collections import OrderedDict

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from xinfer.backends.onnx.rows import Rows
from xinfer.engine.types import Batch

_BINDINGS = 64  # that are kept; one is 4 names a layer


class Calls:
    """Calls a session on rows of the cache.

    Attributes:
        widths: of each output that tells of a layer, how many numbers it has for a token; see `Form.layers`.
    """

    def __init__(self, session: ort.InferenceSession, rows: Rows) -> None:
        self._session, self._rows = session, rows
        names = {each.name for each in session.get_inputs()}
        self._inputs = frozenset(name for name in names if not name.startswith("past_key_values."))
        self._bindings: OrderedDict[tuple[int, int], _Bound] = OrderedDict()
        self._nowhere = torch.empty(1)  # where no logits go, for the runtime takes no null pointer
        self.widths = [int(each.shape[-1]) for each in session.get_outputs() if each.name.startswith("layers.")]

    def call(self, batch: Batch, group: NDArray[np.integer], logits: Tensor, told: list[Tensor] | None = None) -> None:
        """Compute the new tokens of a group's sequences, and what logits of the step [K, vocabulary] belong to them.

        What is `told` of each layer, [T, width], is filled in for these tokens.
        """
        blocks = batch.block_tables[group, 0]
        first = self._rows.gather(blocks)
        if len(group) > 1:
            order = np.argsort(self._rows.row_of[blocks])
            group, blocks = group[order], blocks[order]
        starts, contexts = batch.query_starts[group], batch.context_lens[group]
        lengths = batch.query_starts[group + 1] - starts
        # Rows shorter than the longest repeat their last token; what is computed of that is never looked at.
        tokens = starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        sampled, wanted = _sampled(batch, tokens)
        bound = self._binding(first, len(group))
        bound.feed("input_ids", batch.token_ids[tokens])
        bound.feed("last", contexts - 1)
        bound.feed("longest", contexts.max(keepdims=True))
        bound.feed("sample_at", sampled)
        bound.feed("position_ids", batch.positions[tokens].astype(np.int64))
        bound.feed("lengths", lengths)
        beside = wanted is None or (len(wanted) > 0 and wanted[-1] - wanted[0] == len(wanted) - 1)
        if wanted is None:
            out = logits
        else:
            out = logits[wanted[0] : wanted[-1] + 1] if beside else torch.empty(len(wanted), logits.shape[1])
        into = out if len(out) else self._nowhere
        layers = [torch.empty(*tokens.shape, width) for width in self.widths]
        for index, each in enumerate(layers):
            place = ("cpu", 0, np.float32, tuple(each.shape), each.data_ptr())
            bound.binding.bind_output(f"layers.{index}", *place)
        bound.binding.bind_output("logits", "cpu", 0, np.float32, tuple(out.shape), into.data_ptr())
        self._session.run_with_iobinding(bound.binding)
        if not beside:
            logits[torch.from_numpy(wanted)] = out
        own = torch.from_numpy(np.arange(tokens.shape[1]) < lengths[:, None])
        for into, each in zip(told or (), layers, strict=True):
            into[torch.from_numpy(tokens)[own].long()] = each[own]
        self._rows.filled[blocks] = np.maximum(self._rows.filled[blocks], contexts)

    def _binding(self, first: int, count: int) -> "_Bound":
        """Return what is bound to so many rows of the cache; those used last are kept."""
        bound = self._bindings.get((first, count))
        if bound is not None:
            self._bindings.move_to_end((first, count))
            return bound
        bound = self._bindings[first, count] = _Bound(self._session.io_binding(), self._inputs)
        for index, tensor in enumerate(self._rows.tensors):
            layer, part = index // 2, ("key", "value")[index % 2]
            rows = tensor[first : first + count]
            place = ("cpu", 0, self._rows.numpy_dtype, tuple(rows.shape), rows.data_ptr())
            bound.binding.bind_input(f"past_key_values.{layer}.{part}", *place)
            bound.binding.bind_output(f"present.{layer}.{part}", *place)
        if len(self._bindings) > _BINDINGS:
            self._bindings.popitem(last=False)
        return bound


class _Bound:
    """A binding, and the arrays that it points to: one of the same shape as before is copied, not bound anew."""

    def __init__(self, binding: ort.IOBinding, names: frozenset[str]) -> None:
        self.binding, self._names = binding, names
        self._held: dict[str, NDArray[np.generic]] = {}

    def feed(self, name: str, values: NDArray[np.generic]) -> None:
        """Set an input, if the graph has one of that name."""
        if name not in self._names:
            return
        held = self._held.get(name)
        if held is not None and held.shape == values.shape:
            held[...] = values
        else:
            self._held[name] = np.ascontiguousarray(values)
            self.binding.bind_cpu_input(name, self._held[name])


def _sampled(batch: Batch, tokens: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """Return which of a call's tokens [B, S] have logits [K], and whose rows of the step's these are; None for all."""
    if tokens.shape[1] == 1 and len(tokens) == len(batch.token_ids) == len(batch.sample_at):  # it only decodes
        return np.argsort(tokens[:, 0]).astype(np.int32), None
    place = np.full(len(batch.token_ids), -1, np.int32)
    place[tokens.ravel()[::-1]] = np.arange(tokens.size - 1, -1, -1)
    sampled = place[batch.sample_at]
    wanted = np.flatnonzero(sampled >= 0)
    return sampled[wanted], wanted
