"""While a checkpoint becomes a model, no more is resident than the model, 15 %, and a layer."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from xinfer.errors import ModelError
from xinfer.models.mapped_file import MappedFile
from xinfer.testing.hollow import hollow_folder, hollow_gguf
from xinfer.testing.tiny import tiny_config

LOAD = """
import json, re, sys
from pathlib import Path

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model

def memory(field):
    return int(re.search(rf"{field}:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

before, path = memory("VmRSS"), Path(sys.argv[1])
model = Model(str(path), lambda: path, xinfer_model_families(), dtype=sys.argv[2])
runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), Limits()))
layer = sum(p.numel() * p.element_size() for p in runner.model.layers[0].parameters())
print(json.dumps([memory("VmHWM") - before, runner.info.resident_weight_bytes, layer]))
"""


def config(layers: int, tied: bool) -> dict[str, Any]:
    """Return a llama of 33 million parameters, twice that untied, and 16 million more for each layer."""
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers}
    return tiny_config("llama", num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=tied, **sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        pytest.param(lambda p: hollow_folder(p, config(13, False)), "float32", id="one-file"),
        pytest.param(lambda p: hollow_folder(p, config(28, True), "BF16", 4), "bfloat16", id="shards"),
        pytest.param(lambda p: hollow_folder(p, config(13, False), "BF16"), "float32", id="converted"),
        pytest.param(lambda p: hollow_gguf(p, config(13, True), "Q8_0"), "float32", id="gguf"),
    ],
)
def test_a_gigabyte_loads_in_little_more_than_itself(write: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    done = subprocess.run([sys.executable, "-c", LOAD, str(path), dtype], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    peak, resident, layer = json.loads(done.stdout)
    assert resident >= 0.9e9
    assert peak <= 1.15 * resident + layer


def test_pages_that_were_given_back_are_read_again(tmp_path: Path) -> None:
    """A view of a tensor that is gone still sees the file's numbers."""
    (tmp_path / "file").write_bytes(torch.arange(40_000).numpy().tobytes())
    mapped = MappedFile(tmp_path / "file")
    tensor = mapped.tensor(8, torch.int64, (39_999,))
    view = tensor[1:]
    assert int(view.sum()) == sum(range(2, 40_000))
    del tensor
    mapped.give_back(0, 320_000)
    assert int(view.sum()) == sum(range(2, 40_000))
    assert mapped.tensor(0, torch.int64, (0, 5)).shape == (0, 5)
    assert mapped.tensor(16, torch.int64, ()).item() == 2


def test_a_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", psutil.virtual_memory().total + psutil.swap_memory().total + (1 << 30))
    assert MappedFile(tmp_path / "file").tensor(1 << 30, torch.float32, (5,)).tolist() == [0] * 5


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("empty", "loop", "absent", "."):
        with pytest.raises(ModelError, match=r"can't be read|not a file"):
            MappedFile(tmp_path / name)
