"""Graphs in the cache folder are written once, whoever else writes them, and again where they are damaged."""

import threading

import pytest

from xinfer.backends.onnx import cached
from xinfer.backends.onnx.cached import graph_for
from xinfer.backends.onnx.form import Form
from xinfer.errors import ConfigError
from xinfer.models.families import xinfer_model_families
from xinfer.testing.tiny import tiny_config

SPEC = next(family for family in xinfer_model_families() if family.name == "llama").spec(tiny_config("llama"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path))
    return tmp_path / "onnx"


def test_a_graph_is_written_once(folder):
    path, recipes = graph_for(SPEC, Form(64))
    before = path.stat().st_mtime_ns
    assert graph_for(SPEC, Form(64)) == (path, recipes)
    assert path.stat().st_mtime_ns == before
    assert graph_for(SPEC, Form(65))[0] != path
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["model.onnx", "recipes.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\x00"])
def test_a_damaged_one_is_written_again(damage: str, content: bytes):
    path, recipes = graph_for(SPEC, Form(64))
    whole = path.read_bytes()
    (path.parent / damage).write_bytes(content)
    assert graph_for(SPEC, Form(64)) == (path, recipes)
    assert path.read_bytes() == whole


def test_what_another_process_wrote_meanwhile_stays(monkeypatch: pytest.MonkeyPatch):
    path, recipes = graph_for(SPEC, Form(64))
    node = path.stat().st_ino
    cached._write(path.parent, SPEC, Form(64))  # as by a process that had found nothing a moment ago
    assert path.stat().st_ino == node
    assert graph_for(SPEC, Form(64)) == (path, recipes)


def test_several_at_once_all_find_it(folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(graph_for(SPEC, Form(64))[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [each.name for each in folder.iterdir()] == [found[0].parent.name]  # nothing half-written is left


def test_a_folder_that_can_not_be_written_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XINFER_CACHE"):
        graph_for(SPEC, Form(64))
