"""Where `backend=onnx` computes: what is chosen, what is refused, and what is said of it."""

import logging
import subprocess
import sys

import onnxruntime
import pytest
import torch

from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig, create, providers, supports
from xinfer.backends.onnx.providers import CPU, CUDA, choose
from xinfer.engine.types import Limits
from xinfer.errors import ConfigError, DeviceError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.tiny import tiny_config, write_folder

ALONE = torch.device("cpu")
OTHER = "OpenVINOExecutionProvider"


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch):
    """A runtime built for CUDA and more, whatever is installed; its providers."""
    found = [CUDA, OTHER, CPU]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(found))
    return found


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch):
    """A torch that has two CUDA devices; the provider loads."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(providers, "has_gpu", lambda: True)
    monkeypatch.setattr(providers, "takes", lambda *_: True)
    monkeypatch.setattr(providers, "_load_error", lambda number: None)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    return caplog


def test_cuda_is_taken_where_it_works(two_devices, said):
    assert choose(OnnxConfig()) == providers.Choice(torch.device("cuda:0"), [(CUDA, {}), (CPU, {})])
    assert choose(OnnxConfig("cuda")).device == torch.device("cuda:0")
    assert choose(OnnxConfig("cuda:1")).device == torch.device("cuda:1")
    assert choose(OnnxConfig("cpu")) == providers.Choice(ALONE, [(CPU, {})])
    assert said.messages == []


def test_a_device_that_is_not_there_is_refused(two_devices):
    for name in ("cuda:2", "npu"):
        with pytest.raises(DeviceError, match=f"backend.device='{name}' is not there.*cpu, cuda:0, cuda:1"):
            choose(OnnxConfig(name))


def no_torch(patch):
    patch.setattr(torch.version, "cuda", None)


def no_device(patch):
    patch.setattr(torch.cuda, "is_available", lambda: False)


def no_build(patch):
    patch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    patch.setattr(providers, "onnxruntime_shadowed", lambda: None)


def shadowed(patch):
    no_build(patch)
    patch.setattr(providers, "onnxruntime_shadowed", lambda: "onnxruntime 1 and onnxruntime-gpu 1 share one folder")


def too_old(patch):
    patch.setattr(providers, "takes", lambda *_: False)


def library(patch):
    patch.setattr(providers, "_load_error", lambda number: "libcublasLt.so.13: cannot open shared object file")


WHY = {
    no_torch: r"torch .* is a build without CUDA: install one with it",
    no_device: "torch finds no CUDA device: see whether nvidia-smi lists one",
    no_build: f"has no {CUDA} .it has: {CPU}.: uninstall onnxruntime, then install onnxruntime-gpu",
    shadowed: "share one folder",
    too_old: "install onnxruntime-gpu 1.31 or later",
    library: r"can't be loaded \(libcublasLt.so.13: cannot open shared object file\): it needs the libraries of CUDA",
}


@pytest.mark.parametrize("missing", WHY, ids=lambda function: function.__name__)
def test_what_is_missing_is_told_once_and_the_cpu_taken_or_an_error(two_devices, said, monkeypatch, missing):
    missing(monkeypatch)
    assert choose(OnnxConfig()) == providers.Choice(ALONE, [(CPU, {})])
    assert len(said.messages) == 1
    with pytest.raises(DeviceError, match=f"backend=onnx can't compute on CUDA: .*{WHY[missing]}") as refused:
        choose(OnnxConfig("cuda"))
    reason = str(refused.value).removeprefix("backend=onnx can't compute on CUDA: ")
    assert said.messages[0].startswith(f"backend=onnx computes on the CPU: {reason}")
    assert said.messages[0].endswith("or ask for it (backend.device=cpu)")


def test_nothing_is_said_where_there_is_no_gpu(two_devices, said, monkeypatch):
    monkeypatch.setattr(providers, "has_gpu", lambda: False)
    assert choose(OnnxConfig()) == providers.Choice(ALONE, [(CPU, {})])
    assert said.messages == []


def test_float32_is_computed_on_the_cpu(two_devices, said):
    assert choose(OnnxConfig(), "float32").device == ALONE
    assert choose(OnnxConfig(), "bfloat16").device.type == "cuda"
    assert len(said.messages) == 1
    with pytest.raises(DeviceError, match=r"no float32: take model\.dtype=bfloat16"):
        choose(OnnxConfig("cuda"), "fp32")


def test_providers_may_be_named(two_devices):
    assert choose(OnnxConfig(providers=[OTHER])) == providers.Choice(ALONE, [(OTHER, {}), (CPU, {})])
    given = [{OTHER: {"device_type": "NPU", "cache": 1}}, CPU]
    assert choose(OnnxConfig(providers=given)).providers == [(OTHER, {"device_type": "NPU", "cache": "1"}), (CPU, {})]
    assert choose(OnnxConfig(providers=[CUDA])).device == torch.device("cuda:0")
    given = [{CUDA: {"device_id": 1, "enable_cuda_graph": 0}}]
    found = choose(OnnxConfig(providers=given))
    assert found.device == torch.device("cuda:1")
    assert found.providers == [(CUDA, {"device_id": "1", "enable_cuda_graph": "0"}), (CPU, {})]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            OnnxConfig(providers=["CudaProvider"]),
            f"has 'CudaProvider', which is not there .there are: {CUDA}, {OTHER}, {CPU}",
        ),
        (OnnxConfig(providers=[3]), "has '3', which is not there"),
        (OnnxConfig(providers=[{OTHER: 1}]), "is expected"),
        (OnnxConfig(providers=[{OTHER: {}, CPU: {}}]), "is expected"),
        (OnnxConfig("cpu", providers=[CUDA]), "backend.device=cpu contradicts"),
        (
            OnnxConfig("cuda", providers=[OTHER]),
            rf"backend.device=cuda contradicts backend.providers=\[{OTHER}, {CPU}\]",
        ),
    ],
)
def test_providers_that_make_no_sense_are_refused(config, what):
    with pytest.raises(ConfigError, match=what):
        choose(config)


@pytest.mark.skipif(CUDA not in onnxruntime.get_available_providers(), reason="a build without CUDA is not asked")
def test_the_runtime_is_asked_in_silence_whether_cuda_loads():
    """It names the library that is missing, if CUDA does not load, and leaves nothing on standard error."""
    code = "from xinfer.backends.onnx.providers import _load_error; print(_load_error(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    if not torch.cuda.is_available():
        assert ".so" in done.stdout or "driver" in done.stdout or "CUDAExecutionProvider" in done.stdout


def test_create_takes_the_runner_of_the_device(tmp_path, two_devices, monkeypatch):
    from xinfer.backends.onnx import cuda

    folder = write_folder(tmp_path / "m", tiny_config("llama"), seed=0)
    monkeypatch.setattr(cuda, "CudaRunner", lambda context, choice: choice.device)
    context = BackendContext(Model(str(folder), lambda: folder, xinfer_model_families()), OnnxConfig(), Limits())
    assert create(context) == torch.device("cuda:0")


def test_a_model_that_cuda_can_not_compute_is_refused_by_its_field(tmp_path):
    from dataclasses import replace

    folder = write_folder(tmp_path / "m", tiny_config("llama"), seed=0)
    spec = Model(str(folder), lambda: folder, xinfer_model_families()).spec
    wide = tuple(replace(layer, attention=replace(layer.attention, sinks=True, head_dim=512)) for layer in spec.layers)
    assert supports(spec, OnnxConfig("cuda")) is None
    assert supports(replace(spec, layers=wide), OnnxConfig("cpu")) is None
    assert "layers[0].attention.sinks" in supports(replace(spec, layers=wide), OnnxConfig("cuda"))
