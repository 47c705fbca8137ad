"""Energy is read from the processor's counters where it may be, and else it is said why there is none."""

from pathlib import Path

import pytest
import torch

from xinfer.tasks.energy import EnergyMeter

CPU = torch.device("cpu")


@pytest.fixture
def zones(tmp_path: Path):
    """Write counters of two packages, and of a part of the first."""

    def write(first: int, second: int) -> Path:
        for name, value in (("intel-rapl:0", first), ("intel-rapl:0:0", 7), ("intel-rapl:1", second)):
            zone = tmp_path / "sys/class/powercap" / name
            zone.mkdir(parents=True, exist_ok=True)
            (zone / "energy_uj").write_text(f"{value}\n")
            (zone / "max_energy_range_uj").write_text("10000000\n")
        return tmp_path

    return write


def test_packages_add_up_and_a_counter_may_begin_again(zones):
    meter = EnergyMeter(CPU, zones(1_000_000, 9_500_000))
    meter.start()
    zones(3_000_000, 500_000)
    assert meter.stop() == pytest.approx(2.0 + 1.0)
    assert meter.source == "RAPL"


def test_counters_that_cannot_be_read_are_named(zones):
    root = zones(1, 1)
    (root / "sys/class/powercap/intel-rapl:1/energy_uj").write_text("secret")
    meter = EnergyMeter(CPU, root)
    meter.start()
    assert meter.stop() is None
    assert meter.source.startswith(f"none: {root}/sys/class/powercap/intel-rapl:1/energy_uj can't be read")


def test_without_counters_there_is_no_energy(tmp_path: Path):
    meter = EnergyMeter(CPU, tmp_path)
    meter.start()
    assert meter.stop() is None
    assert meter.source == "none: the processor tells nothing (no RAPL zones)"
