"""Where a model file says that its tensors lie, which is somebody else's word: checked before any of it is opened."""

__all__ = ["check_external_data", "read_model"]

import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from xinfer.errors import ModelError

_LARGEST = 2**31 - 1  # bytes of a model file, as protocol buffers have it
_LARGEST_NUMBER = 20  # digits of an offset or a length
_IN_MEMORY = "*/_ORT_MEM_ADDR_/*"  # for ONNX Runtime not a file, but an address in this process
_BITS = {
    **dict.fromkeys(("FLOAT", "INT32", "UINT32"), 32),
    **dict.fromkeys(("DOUBLE", "INT64", "UINT64", "COMPLEX64"), 64),
    **dict.fromkeys(("FLOAT16", "BFLOAT16", "INT16", "UINT16"), 16),
    **dict.fromkeys(("INT8", "UINT8", "BOOL"), 8),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), 8),
    **dict.fromkeys(("INT4", "UINT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("INT2", "UINT2"), 2),
    "COMPLEX128": 128,
}


def read_model(path: Path) -> onnx.ModelProto:
    """Return a model file's content without its external data, which is checked; see `check_external_data`."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            raise ModelError(f"{path}: no file of at most {_LARGEST} bytes: give a model.onnx with external data")
        model = onnx.load(str(path), load_external_data=False)
    except ModelError:
        raise
    except Exception as error:  # of protobuf's own kinds, which differ between its implementations
        raise ModelError(f"{path}: no ONNX model ({str(error)[:200]}): export or download it again") from error
    check_external_data(path.parent, model)
    return model


def check_external_data(folder: Path, model: onnx.ModelProto) -> None:
    """Refuse a model whose external data is not in regular files inside its folder, or not within them.

    ONNX Runtime maps what a file names, so a name could have it read any file of this machine. Refused are names that
    are absolute, lead out of the folder, are symbolic links or go through one; what is no regular file; and ranges
    that are negative, past the end, or not of the tensor's size. It is a `ModelError` that names the tensor.

    Args:
        folder: where the model file lies; it may itself be reached through links.
        model: the file's content.
    """
    sizes: dict[str, int] = {}
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL and not tensor.external_data:
            continue
        where = f"{folder}: the model's tensor {tensor.name!r:.100}"
        entries = [(entry.key, entry.value) for entry in tensor.external_data]
        if len({key for key, _ in entries}) != len(entries):
            raise ModelError(f"{where} has a key of its external data twice: {_AGAIN}")
        given = dict(entries)
        location = given.get("location", "")
        if location not in sizes:
            sizes[location] = _file_size(folder, location, where)
        _check_range(tensor, given, sizes[location], where)


_AGAIN = "export the model again, or take it from somebody you trust"


def _file_size(folder: Path, location: str, where: str) -> int:
    """Return the size of the file that a location names, if it may be read."""
    said = f"{where} lies in {location!r:.200}"
    parts = location.split("/")
    if location == _IN_MEMORY:
        raise ModelError(f"{said}, which is no file but an address in memory: {_AGAIN}")
    if not location or "\0" in location:
        raise ModelError(f"{said}, which is no file's name: {_AGAIN}")
    if location.startswith("/") or "\\" in location or ":" in parts[0]:
        raise ModelError(f"{said}, but a path relative to the model's folder, with /, is expected: {_AGAIN}")
    if ".." in parts:
        raise ModelError(f"{said}, which leads out of the model's folder: {_AGAIN}")
    path = folder
    names = [part for part in parts if part not in ("", ".")]
    for index, name in enumerate(names):
        path = path / name
        try:
            found = os.lstat(path)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{said}, which can't be read ({_reason(error)}): copy that file beside the model"
            ) from error
        if stat.S_ISLNK(found.st_mode):
            raise ModelError(f"{said}, and {path} is a symbolic link: put a copy of what it names in its place")
        if index < len(names) - 1:
            if not stat.S_ISDIR(found.st_mode):
                raise ModelError(f"{said}, but {path} is no folder: {_AGAIN}")
        elif stat.S_ISREG(found.st_mode):
            return found.st_size
    raise ModelError(f"{said}, which is no regular file: {_AGAIN}")


def _reason(error: OSError | ValueError) -> str:
    """Return why a file can't be read, without its name, which may be long."""
    return str(getattr(error, "strerror", None) or error)


def _check_range(tensor: onnx.TensorProto, given: dict[str, str], size: int, where: str) -> None:
    """Refuse an offset and a length that are not a tensor's of this shape, within a file of this size."""
    offset = _number(given, "offset", where)
    kind = onnx.TensorProto.DataType.Name(tensor.data_type) if tensor.data_type in _KINDS else str(tensor.data_type)
    if kind not in _BITS or any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"{where} is {kind} of the shape {list(tensor.dims)}, which can't lie in a file: {_AGAIN}")
    needed = -(-math.prod(tensor.dims) * _BITS[kind] // 8)
    length = _number(given, "length", where) if "length" in given else needed
    if length != needed:
        raise ModelError(
            f"{where} has length={length}, but {kind} of the shape {list(tensor.dims)} takes {needed} bytes: {_AGAIN}"
        )
    if offset + length > size:
        raise ModelError(
            f"{where} ends at byte {offset + length} (offset={offset}, length={length}), but "
            f"{given['location']!r:.200} has {size}: the file is cut short or of another model: copy it again"
        )


_KINDS = frozenset(onnx.TensorProto.DataType.values())


def _number(given: dict[str, str], key: str, where: str) -> int:
    text = given.get(key, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _LARGEST_NUMBER):
        raise ModelError(f"{where} has {key}={text!r:.100}, but a whole number from 0 is expected: {_AGAIN}")
    return int(text)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor that a model has anywhere."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
        yield from _attribute_tensors(function.attribute_proto)
    for training in model.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _parts(graph.sparse_initializer)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        yield from _attribute_tensors(node.attribute)


def _attribute_tensors(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from _parts([attribute.sparse_tensor])
        yield from _parts(attribute.sparse_tensors)
        if attribute.HasField("g"):
            yield from _graph_tensors(attribute.g)
        for graph in attribute.graphs:
            yield from _graph_tensors(graph)


def _parts(tensors: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for sparse in tensors:
        yield sparse.values
        yield sparse.indices
