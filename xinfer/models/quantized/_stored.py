"""Weights that a checkpoint holds in parts: the parts found and checked by their shapes, read when asked for."""

__all__ = ["BYTES", "FLOAT", "FP8", "INDEX", "INT8", "INTS", "Quantized", "StoredModule", "ceil_div", "stored_modules"]

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.weights import Tensors

FLOAT = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INDEX = (torch.int32, torch.int64)
BYTES, INT8, INTS = (torch.uint8,), (torch.int8,), (torch.int32,)


@dataclass(frozen=True, slots=True)
class Quantized:
    """One weight that is stored in parts.

    Attributes:
        shape: of the weight.
        parts: names of the stored tensors that it stands for.
        load: reads the parts and returns the weight, float32.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    load: Callable[[], Tensor]


class StoredModule:
    """The stored tensors of one module (`model.layers.0.mlp.up_proj`), which must be there and fit each other."""

    def __init__(self, source: Tensors, name: str, separator: str = ".") -> None:
        self.name = name
        self._source, self._prefix = source, name + separator

    def full(self, part: str) -> str:
        """Return a part's name in the checkpoint."""
        return self._prefix + part

    def has(self, part: str) -> bool:
        """Whether the part is stored."""
        return self.full(part) in self._source.shapes

    def present(self, *parts: str) -> tuple[str, ...]:
        """Return the names of those parts that are stored."""
        return tuple(self.full(part) for part in parts if self.has(part))

    def shape(self, part: str, dims: int = 2) -> tuple[int, ...]:
        """Return a part's shape; a missing part, other dimensions or an empty one are a `ModelError`."""
        if not self.has(part):
            raise ModelError(f"the checkpoint lacks {self.full(part)!r}, without which {self.name!r} can't be read")
        shape = self._source.shapes[self.full(part)]
        if len(shape) != dims or 0 in shape:
            raise ModelError(f"tensor {self.full(part)!r} has the shape {list(shape)}, but {dims} dimensions are due")
        return shape

    def expect(self, part: str, *shapes: tuple[int, ...]) -> None:
        """Check that a part has one of some shapes."""
        found = self.shape(part, len(self._source.shapes.get(self.full(part), ())))
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"tensor {self.full(part)!r} has the shape {list(found)}, but quantization_config and the other parts "
                f"of the weight ask for {wanted}"
            )

    def read(self, part: str, kinds: tuple[torch.dtype, ...]) -> Tensor:
        """Return a part, which must be of one of some types."""
        tensor = self._source.load(self.full(part))
        if tensor.dtype not in kinds:
            names = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
            found = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {self.full(part)!r} holds {found}, but {names} is expected: it is another format")
        return tensor


def stored_modules(source: Tensors, part: str, separator: str = ".") -> Iterator[StoredModule]:
    """Yield the modules that have a part."""
    for name in source.shapes:
        if name.endswith(separator + part):
            yield StoredModule(source, name.removesuffix(separator + part), separator)


def ceil_div(number: int, by: int) -> int:
    """Return how many of `by` it takes to hold a number."""
    return -(-number // by)
