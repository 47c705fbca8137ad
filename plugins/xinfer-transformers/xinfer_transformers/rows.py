"""Keys and values: of each sequence tensors of its own, and of those that decode together one padded cache."""

__all__ = ["Rows"]

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

Row = list[tuple[Tensor, Tensor]]  # of each layer keys and values, [heads, tokens, width]


class Rows:
    """The engine's blocks, each a whole sequence. Tensors are never written to, so rows may share them.

    Sequences that decode together lie side by side in one cache, each with its end at the cache's end, as transformers
    pads a batch. As long as the same ones go on, that cache just grows; when that changes, each gets a row back.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._together: tuple[list[int], list[int], Cache] = ([], [], DynamicCache())

    def cache(self, blocks: list[int], past: list[int]) -> Cache:
        """Return a cache of these blocks with so many tokens of each, padded at the beginning to the longest."""
        if self._together[:2] == (blocks, past):
            return self._together[2]
        for block in blocks:
            self._leave(block)
        some = next((self._rows[block] for block, tokens in zip(blocks, past, strict=True) if tokens), None)
        if some is None:
            return DynamicCache()
        rows = [self._rows[block] if tokens else some for block, tokens in zip(blocks, past, strict=True)]
        return Cache(layers=[_layer([row[i] for row in rows], past) for i in range(len(some))])

    def keep(self, blocks: list[int], lengths: list[int], cache: Cache) -> None:
        """Keep what a call has left in the cache, which now holds so many tokens of each block."""
        if len(blocks) > 1:
            for block in self._together[0]:
                self._leave(block)
            self._together = (blocks, lengths, cache)
        else:
            self._rows[blocks[0]] = [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Let `target` begin with the first tokens of `source`."""
        self._leave(source)
        self._leave(target)
        self._rows[target] = [(keys[:, :tokens], values[:, :tokens]) for keys, values in self._rows[source]]

    def free(self, blocks: Sequence[int]) -> None:
        """Forget blocks."""
        for block in blocks:
            self._leave(block)
            self._rows.pop(block, None)

    def _leave(self, block: int) -> None:
        """Give everybody who decodes together with this block a row, if it does so."""
        blocks, lengths, cache = self._together
        if block in blocks:
            self._together = ([], [], DynamicCache())
            for i, (each, end) in enumerate(zip(blocks, lengths, strict=True)):
                # cloned, so that no row keeps the others' memory
                self._rows[each] = [(x.keys[i, :, -end:].clone(), x.values[i, :, -end:].clone()) for x in cache.layers]


def _layer(rows: Row, past: list[int]) -> DynamicLayer:
    """Return one layer's cache of some sequences' keys and values, the first `past` tokens of each."""
    layer = DynamicLayer()
    keys, values = (_padded([row[i] for row in rows], past) for i in (0, 1))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _padded(rows: list[Tensor], past: list[int]) -> Tensor:
    """Return [B, heads, longest, width]: each row's first `past` tokens, behind zeros."""
    longest, (heads, _, width) = max(past), rows[0].shape
    if len(rows) == 1:
        return rows[0][None, :, :longest]
    padded = rows[0].new_zeros(len(rows), heads, longest, width)
    for into, row, tokens in zip(padded, rows, past, strict=True):
        into[:, longest - tokens :] = row[:, :tokens]
    return padded
