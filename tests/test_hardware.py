"""Hardware files build, and a step takes what the roofline says."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from kvsim.hardware import HardwareSpec

CONF = Path(__file__).parent.parent / "conf" / "hardware"
ROUND: dict[str, Any] = {
    "flops_per_s": 1000.0,
    "memory_bytes": 64,
    "memory_bytes_per_s": 100.0,
    "host_to_device_bytes_per_s": 10.0,
    "device_to_host_bytes_per_s": 8.0,
    "both_directions_bytes_per_s": 15.0,
    "disk_read_bytes_per_s": 2.0,
    "disk_write_bytes_per_s": 1.0,
    "step_overhead_s": 0.5,
}


def from_file(name: str) -> HardwareSpec:
    settings = OmegaConf.load(CONF / f"{name}.yaml")
    assert isinstance(settings, DictConfig) and settings.pop("_target_") == "kvsim.hardware.HardwareSpec"
    spec = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HardwareSpec), settings))
    assert isinstance(spec, HardwareSpec)
    return spec


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_hardware_file_is_faster_at_home_than_over_its_links(path: Path) -> None:
    hardware = from_file(path.stem)
    rates = (
        hardware.effective_memory_bytes_per_s,
        hardware.total_both_directions_bytes_per_s,
        hardware.total_host_to_device_bytes_per_s,
        hardware.disk_read_bytes_per_s,
    )
    assert sorted(rates, reverse=True) == list(rates)


def test_the_h200_is_as_measured() -> None:
    h200 = from_file("h200")
    assert (h200.effective_flops_per_s, h200.effective_memory_bytes_per_s) == (790e12, 4.3e12)
    assert h200.host_to_device_bytes_per_s == h200.device_to_host_bytes_per_s == 55.4e9
    assert (h200.both_directions_bytes_per_s, h200.total_memory_bytes) == (101e9, 141 * 10**9)
    assert (h200.disk_read_bytes_per_s, h200.disk_write_bytes_per_s) == (3.2e9, 3.0e9)


def test_a_step_takes_the_longer_of_compute_and_memory_and_the_overhead() -> None:
    hardware = HardwareSpec(**ROUND)
    assert hardware.step_s(2000, 100) == 2.0 + 0.5
    assert hardware.step_s(2000, 300) == 3.0 + 0.5


def test_efficiency_is_the_fraction_of_the_peak_that_counts() -> None:
    hardware = HardwareSpec(**ROUND, flops_efficiency=0.5, memory_efficiency=0.25)
    assert hardware.step_s(1000, 0) == 2.0 + 0.5
    assert hardware.step_s(0, 100) == 4.0 + 0.5


def test_gpus_multiply_everything_but_the_disk_and_the_overhead() -> None:
    hardware = HardwareSpec(**ROUND, gpus=4)
    assert hardware.step_s(4000, 100) == 1.0 + 0.5
    assert hardware.step_s(0, 800) == 2.0 + 0.5
    assert hardware.total_memory_bytes == 256
    assert (hardware.total_host_to_device_bytes_per_s, hardware.total_device_to_host_bytes_per_s) == (40, 32)
    assert hardware.total_both_directions_bytes_per_s == 60
    assert (hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s) == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": 0.0}, "flops_per_s must be above 0, not 0.0"),
        ({"disk_read_bytes_per_s": float("nan")}, "disk_read_bytes_per_s must be above 0, not nan"),
        ({"gpus": 0}, "gpus must be above 0, not 0"),
        ({"host_latency_s": -1.0}, "host_latency_s must be 0 or more, not -1.0"),
        ({"memory_efficiency": 90.0}, "memory_efficiency must be above 0 and at most 1, not 90.0"),
        ({"both_directions_bytes_per_s": 9.0}, "both_directions_bytes_per_s must be at least 10, .* not 9"),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HardwareSpec(**(ROUND | change))
