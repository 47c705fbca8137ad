"""Whatever stands in a folder of safetensors, it is read as the format says or refused at once."""

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.reader import Reader
from xinfer.models.safetensors_reader import _TYPES, read_safetensors
from xinfer.testing.tiny import tiny_config, write_folder

INDEX = "model.safetensors.index.json"


def model(path: Path) -> Model:
    return Model(str(path), lambda: path, xinfer_model_families())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", tiny_config("llama", num_hidden_layers=1), 5, shards=3)


@contextmanager
def at_once() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < 5  # here one, and more for machines that are slower or shared


def written(folder: Path, entries: dict[str, Any], data: bytes) -> Path:
    header = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(shape: Any, first: Any, last: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


# --- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", _TYPES)
def test_each_type_is_read_as_the_library_does(kind: str, tmp_path: Path) -> None:
    size = _TYPES[kind].itemsize * 6
    path = written(tmp_path, {"a": entry([2, 3], 0, size, kind)}, bytes([1, 0, 1, 1, 0, 1, 0, 0] * 12)[:size])
    ours = read_safetensors([path]).load("a")
    with safe_open(path, "pt") as opened:
        theirs = opened.get_tensor("a")
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.view(torch.uint8).equal(theirs.view(torch.uint8))


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "F6_E3M2"])
def test_a_type_that_can_not_be_read_matters_only_where_it_is_needed(kind: str, tmp_path: Path) -> None:
    bits = int(kind[1])
    end = 32 * bits // 8
    entries = {"a": entry([32], 0, end, kind), "b": entry([1], end, end + 4)}
    path = written(tmp_path, entries, bytes(end + 4))
    tensors = read_safetensors([path])
    assert tensors.load("b").tolist() == [0]
    with pytest.raises(ModelError, match=f"'a' has the type {kind}"):
        tensors.load("a")


def test_tensors_without_dimensions_or_numbers_are_read(tmp_path: Path) -> None:
    entries = {"scalar": entry([], 0, 4), "empty": entry([0, 2**40], 4, 4), "one": entry([1, 1], 4, 8)}
    tensors = read_safetensors([written(tmp_path, entries, struct.pack("<ff", 2, 3))])
    assert tensors.load("scalar").item() == 2
    assert tensors.load("empty").shape == (0, 2**40)
    assert tensors.load("one").tolist() == [[3]]


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
        {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
        {"a": entry([3], 4, 16)},
        {"a": entry([3], 8, -4)},
        {"a": entry([3], 12, 0)},
        {"a": entry([2**62, 4], 0, 12)},
        {"a": entry([2**32, 2**32], 0, 12)},
        {"a": entry([2**64, 3], 0, 12)},
        {"a": entry([3.0], 0, 12)},
        {"a": entry([True], 0, 12)},
        {"a": entry(["3"], 0, 12)},
        {"a": entry([-1, -3], 0, 12)},
        {"a": entry(3, 0, 12)},
        {"a": entry([3], 0.0, 12)},
        {"a": entry([3], 2**63, 2**63 + 12)},
        {"a": entry([3], 0, 12, "I4")},
        {"a": entry([3], 0, 12, None)},
        {"a": [3]},
        {"__metadata__": {"a": 1}, "a": entry([3], 0, 12)},
        {"__metadata__": []},
    ],
    ids=str,
)
def test_entries_that_describe_no_tensors_are_refused(entries: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors.*download it again"):
        read_safetensors([written(tmp_path, entries, bytes(12))])


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    path = write_folder(tmp_path, tiny_config("llama", num_hidden_layers=1), 5)
    tensors = load_file(path / "model.safetensors")
    up = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {up: tensors[up].astype(np.int8)}, path / "model.safetensors")
    with (
        Reader(model(path).weights, torch.device("cpu"), torch.float32) as reader,
        pytest.raises(ModelError, match=r"layers\.0\.mlp\.up\.weight is stored as int8"),
    ):
        reader.load("layers.0.mlp.up.weight")


# --- headers made to be slow or large -------------------------------------------------------------------------------

MANY = 1 << 17
NOTHING = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":' + b"[" * MANY, "recursion"),
        (b"[" + b"{}," * MANY + b"{}]", "damaged"),
        (b'{"a":{"x":[' + b"[]," * MANY + b"0]}}", "missing field"),
        (b"{" + (b'"a":' + NOTHING + b",") * (MANY - 1) + b'"b":1}', "invalid type"),
        (b"{" + b",".join(b'"%d":' % (i // 2) + NOTHING for i in range(50_000)) + b"}", "'0' twice"),
        (b"{" + b" " * (9 << 20) + b"}", "a header of 9437186 bytes, more than"),
    ],
    ids=["deep", "objects", "arrays", "names", "twice", "long"],
)
def test_a_header_made_to_take_long_does_not(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with at_once(), pytest.raises(ModelError, match=f"model.safetensors.*{message}"):
        read_safetensors([path])


@pytest.mark.parametrize("claimed", [10**8, 10**9, 2**40 - 8])
def test_a_header_of_holes_is_not_read(claimed: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", claimed))
    os.truncate(path, 2**40)
    with at_once(), pytest.raises(ModelError, match=rf"a header of {claimed} bytes, more than"):
        read_safetensors([path])


# --- what is no file ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names")
@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path, tiny_config("llama", num_hidden_layers=1), 5)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        model(path).weights  # noqa: B018


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_link_to_itself_is_refused_or_passed_over(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path, tiny_config("llama", num_hidden_layers=1), 5)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(name)
    with suppress(ModelError):
        model(path).weights  # noqa: B018
        assert name == INDEX


# --- the index ------------------------------------------------------------------------------------------------------


def changed(folder: Path, **changes: Any) -> Path:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | changes))
    return folder


def weight_map(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def test_what_an_index_says_of_sizes_does_not_matter(sharded: Path) -> None:
    for size in (0, -1, 2**70, "x", None, []):
        assert len(list(model(changed(sharded, metadata={"total_size": size})).weights)) == 12


def test_tensors_that_the_index_leaves_out_are_read_from_its_files(sharded: Path) -> None:
    """As transformers does, for which the index says no more than which files there are."""
    files = sorted(set(weight_map(sharded).values()))
    assert len(list(model(changed(sharded, weight_map={file: file for file in files})).weights)) == 12


def test_a_tensor_that_no_shard_has_is_missed_only_if_it_is_needed(sharded: Path) -> None:
    first = min(weight_map(sharded).values())
    unneeded = weight_map(sharded) | {"model.layers.0.self_attn.rotary_emb.inv_freq": first}
    assert len(list(model(changed(sharded, weight_map=unneeded)).weights)) == 12
    tensors = load_file(sharded / first)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, sharded / first)
    with pytest.raises(ModelError, match=r"lacks 'embed\.weight'"):
        model(sharded).weights  # noqa: B018


@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_an_index_of_any_length_is_read_or_refused_at_once(count: int, sharded: Path) -> None:
    files = sorted(set(weight_map(sharded).values()))
    changed(sharded, weight_map={f"model.layers.{i}.weight": files[i % 3] for i in range(count)})
    with at_once(), suppress(ModelError):
        assert len(list(model(sharded).weights)) == 12
        assert count == 100_000


def test_of_many_missing_shards_some_are_named(sharded: Path) -> None:
    changed(sharded, weight_map={str(i): f"model-{i:06}.safetensors" for i in range(100_000)})
    with at_once(), pytest.raises(ModelError, match=r"'model-000019\.safetensors' and 99980 more"):
        model(sharded).weights  # noqa: B018


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_to_any_file_never_raises_anything_else(data: st.DataObject, sharded: Path) -> None:
    files = [sharded / INDEX, *(sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))]
    originals = {file: file.read_bytes() for file in files}
    try:
        for _ in range(data.draw(st.integers(1, 3))):
            damage(data, data.draw(st.sampled_from(files)))
        with at_once(), suppress(ModelError):
            weights = model(sharded).weights
            for name in weights:
                assert tuple(weights.load(name).shape) == weights.spec.tensors[name]
    finally:
        for file, original in originals.items():
            file.write_bytes(original)


def damage(data: st.DataObject, file: Path) -> None:
    """Change a byte, most likely of the header, or cut the file off."""
    content = bytearray(file.read_bytes())
    if content and data.draw(st.booleans()):
        content[data.draw(st.integers(0, min(len(content), 900) - 1))] = data.draw(st.integers(0, 255))
    else:
        del content[data.draw(st.integers(0, len(content))) :]
    file.write_bytes(content)
