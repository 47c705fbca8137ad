"""What can't be done as asked is refused before llama.cpp is needed."""

from pathlib import Path
from typing import Any

import pytest
from xinfer_llamacpp import LlamaCppConfig, create, supports

from xinfer import BackendContext, Limits, XinferError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaCppConfig(), None),
        (LlamaCppConfig(kv_dtype="float23"), "backend.kv_dtype='float23' is unknown (did you mean 'float32'"),
        (LlamaCppConfig(flash_attention="yes"), "backend.flash_attention='yes' is unknown (there are: auto, on, off)"),
        (LlamaCppConfig(threads=0), "backend.threads=0 is out of range"),
        (LlamaCppConfig(ubatch=-1), "backend.ubatch=-1 is out of range"),
    ],
)
def test_values_that_can_not_be_are_named(config: LlamaCppConfig, reason: str | None):
    found = supports(None, config)
    assert found is None if reason is None else str(found).startswith(reason)


def refusal(path: Path, **held: Any) -> str:
    model = Model(str(path), lambda: path, xinfer_model_families(), **held)
    with pytest.raises(XinferError) as caught:
        create(BackendContext(model, LlamaCppConfig(), Limits()))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_folder_is_refused_with_what_to_do(tmp_path: Path):
    folder = write_folder(tmp_path, tiny_config("llama"), seed=0)
    assert "convert the folder with llama.cpp's convert_hf_to_gguf.py" in refusal(folder)


def test_what_llama_cpp_would_leave_out_silently_is_refused(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_config("llama"), seed=0)
    assert "model.load_format=dummy" in refusal(file, load_format="dummy")
    assert "model.dtype=bfloat16" in refusal(file, dtype="bfloat16")
    assert "model.lora" in refusal(file, adapter=object)
