"""Where a model file says that its tensors lie: anything that could have another file read is refused."""

import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from xinfer.backends.onnx.external import check_external_data, read_model
from xinfer.errors import ModelError

INSIDE = {"location": "w.data", "offset": "0", "length": "16"}


def external(entries: dict[str, str] | list[tuple[str, str]], dims=(4,), kind=TensorProto.FLOAT, name="weight"):
    tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items() if isinstance(entries, dict) else entries:
        tensor.external_data.add(key=key, value=value)
    return tensor


def model_of(*tensors: TensorProto, nodes=(), sparse=()) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", [], [], list(tensors), sparse_initializer=list(sparse))
    return helper.make_model(graph)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_bytes(bytes(64))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "w.data").write_bytes(bytes(32))
    (folder / "sub" / "w.data").write_bytes(bytes(32))
    return folder


def check(folder: Path, entries, **more) -> None:
    check_external_data(folder, model_of(external(entries, **more)))


def refusal(folder: Path, entries, **more) -> str:
    with pytest.raises(ModelError) as caught:
        check(folder, entries, **more)
    message = str(caught.value)
    assert "weight" in message and ": " in message
    return message


@pytest.mark.parametrize("location", ["w.data", "sub/w.data", "./w.data", "sub//w.data"])
def test_files_inside_are_taken(folder: Path, location: str):
    check(folder, INSIDE | {"location": location, "offset": "16"})
    check(folder, {"location": location})  # from the beginning, as much as it needs


def test_the_folder_itself_may_be_reached_through_a_link(folder: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(folder)
    check(tmp_path / "link", INSIDE)


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("/etc/passwd", "relative"),
        ("C:/windows/w.data", "relative"),
        ("\\\\host\\share", "relative"),
        ("sub\\w.data", "relative"),
        ("../outside", "leads out"),
        ("sub/../../outside", "leads out"),
        ("sub/../w.data", "leads out"),
        ("", "no file's name"),
        ("w.data\0x", "no file's name"),
        ("*/_ORT_MEM_ADDR_/*", "address in memory"),
        ("nothing.data", "copy that file"),
        ("w.data/x", "is no folder"),
        ("sub", "no regular file"),
        (".", "no regular file"),
        ("x" * 5000, "can't be read"),
    ],
)
def test_other_locations_are_refused(folder: Path, location: str, why: str):
    message = refusal(folder, INSIDE | {"location": location})
    assert why in message and len(message) < 1000


def test_an_address_in_memory_stays_refused_where_a_file_has_that_name(folder: Path):
    place = folder / "*" / "_ORT_MEM_ADDR_"
    place.mkdir(parents=True)
    (place / "*").write_bytes(bytes(64))
    assert "address in memory" in refusal(folder, INSIDE | {"location": "*/_ORT_MEM_ADDR_/*"})


def test_symbolic_links_are_refused(folder: Path, tmp_path: Path):
    (folder / "out.data").symlink_to(tmp_path / "outside")
    (folder / "in.data").symlink_to("w.data")  # one that leads nowhere else may do so by the time it is opened
    (folder / "up").symlink_to(tmp_path)
    (folder / "broken").symlink_to("nowhere")
    for location in ("out.data", "in.data", "up/outside", "up/model/w.data", "broken"):
        message = refusal(folder, INSIDE | {"location": location})
        assert "symbolic link" in message and "copy" in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have no names here")
def test_what_is_no_regular_file_is_refused_without_opening_it(folder: Path):
    os.mkfifo(folder / "pipe")
    assert "no regular file" in refusal(folder, INSIDE | {"location": "pipe"})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"offset": "-1"}, "offset='-1'"),
        ({"length": "-16"}, "length='-16'"),
        ({"offset": "1e3"}, "whole number"),
        ({"offset": "٣"}, "whole number"),
        ({"offset": ""}, "whole number"),
        ({"offset": "9" * 30}, "whole number"),
        ({"offset": "17"}, "ends at byte 33"),
        ({"offset": "18446744073709551615"}, "ends at byte"),
        ({"length": "12"}, "takes 16 bytes"),
        ({"length": "32"}, "takes 16 bytes"),
    ],
)
def test_ranges_are_inside_the_file_and_of_the_tensors_size(folder: Path, changes: dict[str, str], why: str):
    assert why in refusal(folder, INSIDE | changes)


def test_shapes_and_types_must_make_a_size(folder: Path):
    assert "shape [-4]" in refusal(folder, INSIDE, dims=(-4,))
    assert "STRING" in refusal(folder, INSIDE, kind=TensorProto.STRING)
    assert "77" in refusal(folder, INSIDE, kind=77)
    assert "takes 36893488147419103232 bytes" in refusal(folder, INSIDE, dims=(1 << 62, 2))
    check(folder, INSIDE | {"length": "2"}, kind=TensorProto.UINT4, dims=(3,))
    check(folder, INSIDE | {"length": "0"}, dims=(0,))


def test_a_key_that_is_there_twice_is_refused(folder: Path):
    entries = [*INSIDE.items(), ("location", "../outside")]
    assert "twice" in refusal(folder, entries)


def test_tensors_are_found_wherever_they_are(folder: Path):
    bad = external(INSIDE | {"location": "../outside"})
    inner = helper.make_graph([], "inner", [], [], [bad])
    nodes = [
        helper.make_node("Constant", [], ["x"], value=bad),
        helper.make_node("If", ["c"], ["y"], then_branch=inner),
        helper.make_node("Custom", [], ["z"], domain="own", many=[bad]),
        helper.make_node("Custom", [], ["z"], domain="own", graphs=[inner]),
    ]
    sparse = onnx.SparseTensorProto(values=bad, indices=external(INSIDE), dims=[8])
    models = [model_of(nodes=[node]) for node in nodes] + [model_of(sparse=[sparse])]
    function = model_of()
    function.functions.add(name="f", domain="own").node.append(nodes[0])
    training = model_of()
    training.training_info.add().initialization.initializer.append(bad)
    for model in [*models, function, training]:
        with pytest.raises(ModelError, match="leads out"):
            check_external_data(folder, model)


def test_tensors_in_the_model_itself_are_nothing_to_check(folder: Path):
    check_external_data(folder, model_of(helper.make_tensor("weight", TensorProto.FLOAT, [1], [1.0])))


def test_a_model_file_is_read_without_its_data(folder: Path):
    onnx.save_model(model_of(external(INSIDE)), folder / "model.onnx")
    assert read_model(folder / "model.onnx").graph.initializer[0].name == "weight"
    onnx.save_model(model_of(external(INSIDE | {"location": "../outside"})), folder / "model.onnx")
    with pytest.raises(ModelError, match="leads out"):
        read_model(folder / "model.onnx")
    for name, content in (("junk.onnx", b"\xff" * 100), ("text.onnx", b"hello")):
        (folder / name).write_bytes(content)
        with pytest.raises(ModelError, match="no ONNX model"):
            read_model(folder / name)
    with pytest.raises(ModelError, match=r"give a model\.onnx"):
        read_model(folder / "sub")
