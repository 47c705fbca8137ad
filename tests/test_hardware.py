"""What the machine is said to be and to do: read from files that are made up here, never judged by its speed."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from xinfer import hardware
from xinfer.hardware import Speed, available_memory, describe, gibibytes, known_speed, speed, versions

CPU = torch.device("cpu")
GIB = 2**30
FAST = Speed(read_bytes_s=5e10, fp32_flop_s=2e11, bf16_flop_s=4e11, fp16_flop_s=1e9, measured="2026-01-02")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make up a machine's files below a root of its own."""
    root = tmp_path / "root"
    monkeypatch.setattr(hardware, "_ROOT", root)

    def write(path: str, text: object) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")

    return write


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Speed]:
    """What measuring finds, one after the other, instead of measuring."""
    found = [FAST]
    monkeypatch.setattr(hardware, "measure", lambda device: found.pop(0))
    return found


def limit_v2(machine, folder: str, limit: object, used: int, cached: int = 0) -> None:
    machine(f"sys/fs/cgroup/{folder}/memory.max", limit)
    machine(f"sys/fs/cgroup/{folder}/memory.current", used)
    machine(f"sys/fs/cgroup/{folder}/memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 7")


def test_without_a_cgroup_the_system_says_what_is_available(machine):
    assert abs(available_memory(CPU) - psutil.virtual_memory().available) < GIB


def test_the_tightest_limit_on_the_way_up_counts(machine):
    machine("proc/self/cgroup", "0::/slice/service")
    limit_v2(machine, "slice/service", "max", 3 << 20)
    limit_v2(machine, "slice", 64 << 20, 24 << 20)
    limit_v2(machine, "", 128 << 20, 30 << 20)
    assert available_memory(CPU) == 40 << 20
    assert describe().memory == 64 << 20


def test_pages_cached_from_files_can_be_had_back(machine):
    machine("proc/self/cgroup", "0::/")
    limit_v2(machine, "", 64 << 20, 60 << 20, cached=50 << 20)
    assert available_memory(CPU) == 54 << 20


def test_a_limit_that_is_exceeded_leaves_nothing(machine):
    machine("proc/self/cgroup", "0::/")
    limit_v2(machine, "", 64 << 20, 65 << 20)
    assert available_memory(CPU) == 0


def test_version_1_has_its_own_names_and_no_limit_is_a_very_large_one(machine):
    machine("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/")
    for folder, limit in (("a/b", 9223372036854771712), ("a", 64 << 20)):
        machine(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
        machine(f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", 16 << 20)
        machine(f"sys/fs/cgroup/memory/{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {4 << 20}")
    assert available_memory(CPU) == 52 << 20


@pytest.mark.parametrize("path", ["/docker/0123", "/../../elsewhere"])
def test_a_path_that_only_the_host_knows_still_meets_the_containers_limit(machine, path: str):
    machine("proc/self/cgroup", f"0::{path}")
    limit_v2(machine, "", 64 << 20, 24 << 20)
    assert available_memory(CPU) == 40 << 20


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3),
        ({"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 8),
        ({}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota(machine, monkeypatch, files: dict[str, object], cores: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    machine("proc/self/cgroup", "0::/\n1:cpu,cpuacct:/")
    for name, text in files.items():
        machine(f"sys/fs/cgroup/{name}", text)
    assert describe().logical_cores == cores


def test_the_processor_is_named_with_what_its_kernels_need(machine):
    x86 = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512_bf16 bf16ish amx_bf16"
    machine("proc/cpuinfo", f"processor\t: 0\n{x86}\n\nprocessor\t: 1\n{x86}")
    assert describe().cpu == "AMD EPYC (family 25, model 17)"
    assert describe().instruction_sets == ("avx2", "avx512_bf16", "amx_bf16")


def test_an_arm_processor_lists_features(machine):
    machine("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd asimddp sve bf16")
    assert describe().instruction_sets == ("asimd", "asimddp", "sve", "bf16")


def test_the_description_goes_into_json():
    described = json.loads(json.dumps(asdict(describe())))
    assert described["cpu"]
    assert described["physical_cores"] >= 1
    assert 1 <= described["logical_cores"] <= (os.cpu_count() or 1)
    assert described["memory"] >= available_memory(CPU)
    assert len(described["gpus"]) == torch.cuda.device_count()


def test_the_key_is_stable_and_follows_the_number_of_threads():
    threads, key = torch.get_num_threads(), describe().key
    assert describe().key == key
    try:
        torch.set_num_threads(threads + 1)
        assert describe().key != key
    finally:
        torch.set_num_threads(threads)
    assert describe().key == key


def test_versions_are_those_installed():
    found = versions()
    assert found["torch"] == metadata.version("torch")
    assert found["python"] == sys.version.split()[0]
    assert found["xinfer"]


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert versions() == {"xinfer": "unknown", "python": sys.version.split()[0]}


@pytest.mark.parametrize(
    ("installed", "warned"),
    [
        ({"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}, True),
        ({"onnxruntime-gpu": "1.31.1"}, False),
        ({"onnxruntime": "1.32.0"}, False),
        ({}, False),
    ],
)
def test_two_builds_of_onnx_runtime_are_warned_of(monkeypatch, installed: dict[str, str], warned: bool):
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    warning = hardware.onnxruntime_shadowed()
    assert (warning is not None) == warned
    if warning:
        assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1" in warning
        assert "uninstall both" in warning


def test_providers_of_onnx_runtime_are_listed_or_none(monkeypatch: pytest.MonkeyPatch):
    assert "CPUExecutionProvider" in hardware.onnx_providers()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert hardware.onnx_providers() == []


def test_the_module_imports_no_runtime():
    code = "import sys, xinfer.hardware; print({'onnxruntime', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_peak_memory_is_this_process_own(tmp_path: Path):
    ballast = torch.ones(64 << 20)  # 256 MiB, which the peak of a child must not contain
    code = "from xinfer.hardware import peak_memory; import torch; print(peak_memory()); torch.ones(128 << 20)"
    code += "; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert hardware.peak_memory() >= ballast.nbytes
    assert 400 << 20 < after - before < 700 << 20


def test_gibibytes_are_for_people():
    assert gibibytes(1.5 * GIB) == "1.50 GiB"
    assert gibibytes(2**27) == "0.12 GiB"
    assert gibibytes(2**27 - 1) == "128.0 MiB"
    assert gibibytes(0) == "0.0 MiB"


def test_measured_figures_are_positive(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "_SECONDS", 0.1)
    found = hardware.measure(CPU)
    rates = [found.read_bytes_s, *map(found.flop_s, (torch.float32, torch.bfloat16, torch.float16))]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads can't be held on a core here")
def test_threads_are_held_on_cores_of_their_own_only_while_measuring():
    def masks() -> dict[int, set[int]]:
        return {thread.id: os.sched_getaffinity(thread.id) for thread in psutil.Process().threads()}

    torch.ones(512, 512) @ torch.ones(512, 512)  # starts the threads
    before = masks()
    with hardware._spread():
        held = [mask for thread, mask in masks().items() if mask != before[thread]]
    assert all(len(mask) == 1 for mask in held)
    assert len(set(map(frozenset, held))) == len(held)
    assert masks() == before


def test_a_device_is_measured_once(tmp_path: Path, measured: list[Speed]):
    cache = tmp_path / "new" / "folder"
    assert known_speed(CPU, cache=cache) is None
    assert speed(CPU, cache=cache) == FAST
    assert speed(CPU, cache=cache) == FAST
    assert known_speed(CPU, cache=cache) == FAST
    assert [path.name for path in cache.iterdir()] == ["hardware.json"]
    assert not measured


def test_measuring_again_keeps_the_higher_figures(tmp_path: Path, measured: list[Speed]):
    measured.append(replace(FAST, read_bytes_s=6e10, fp32_flop_s=1e11, measured="2026-01-03"))
    speed(CPU, cache=tmp_path)
    best = replace(FAST, read_bytes_s=6e10, measured="2026-01-03")
    assert speed(CPU, cache=tmp_path, again=True) == best
    assert known_speed(CPU, cache=tmp_path) == best


def test_other_machines_stay_in_the_cache(tmp_path: Path, measured: list[Speed]):
    (tmp_path / "hardware.json").write_text(json.dumps({"elsewhere cpu": asdict(FAST)}))
    speed(CPU, cache=tmp_path)
    assert set(json.loads((tmp_path / "hardware.json").read_text())) == {"elsewhere cpu", f"{describe().key} cpu"}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        {"read_bytes_s": 1.0},
        asdict(FAST) | {"unknown": 1},
        asdict(FAST) | {"read_bytes_s": 0.0},
        asdict(FAST) | {"read_bytes_s": "much"},
    ],
)
def test_a_damaged_entry_is_measured_anew(tmp_path: Path, measured: list[Speed], entry: object):
    (tmp_path / "hardware.json").write_text(json.dumps({f"{describe().key} cpu": entry}))
    assert known_speed(CPU, cache=tmp_path) is None
    assert speed(CPU, cache=tmp_path) == FAST
    assert known_speed(CPU, cache=tmp_path) == FAST


@pytest.mark.parametrize("content", [b"", b'{"', b"[1]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_damaged_file_is_written_anew(tmp_path: Path, measured: list[Speed], content: bytes):
    (tmp_path / "hardware.json").write_bytes(content)
    assert known_speed(CPU, cache=tmp_path) is None
    assert speed(CPU, cache=tmp_path) == FAST
    assert known_speed(CPU, cache=tmp_path) == FAST


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, measured: list[Speed], caplog):
    (tmp_path / "file").write_text("")
    assert speed(CPU, cache=tmp_path / "file" / "below") == FAST
    assert "can't be kept" in caplog.text
    assert known_speed(CPU, cache=tmp_path / "file" / "below") is None
