"""Hardware files build, and a step takes what the roofline says."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from kvsim.engine.substrate import Work
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec, LinearHardware, RankFault
from kvsim.model.spec import ModelSpec
from kvsim.plans.construct import construct
from kvsim.substrate.simulated.compute import step_times

CONF = Path(__file__).parent.parent.parent / "conf" / "hardware"
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
    return construct(HardwareSpec, OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")), "hardware")


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
        ({"disk_read_bytes_per_s": float("nan")}, "disk_read_bytes_per_s must be a finite number above 0, not nan"),
        ({"gpus": 0}, "gpus must be at least 1, not 0"),
        ({"host_latency_s": -1.0}, "host_latency_s must be 0 or more, not -1.0"),
        ({"memory_efficiency": 90.0}, "memory_efficiency must be above 0 and at most 1, not 90.0"),
        (
            {"both_directions_bytes_per_s": 9.0},
            "both_directions_bytes_per_s must be at least 10, not 9.0; host_to_device_bytes_per_s is the rate of one",
        ),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HardwareSpec(**(ROUND | change))


FAULT = {"rank": 1, "link": "disk-cpu", "share": 0.1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 2, "rank_jitter": 1.0}, "hardware.rank_jitter must be at least 0 and below 1, not 1.0"),
        ({"rank_jitter": 0.1}, "hardware.rank_jitter has no effect with gpus=1, which has one rank: leave it out, or set gpus"),
        ({"rank_faults": [FAULT | {"rank": 0}]}, "hardware.rank_faults has no effect with gpus=1"),
        ({"gpus": 2, "rank_faults": [FAULT | {"rank": 2}]}, "hardware.rank_faults has rank 2, but gpus=2 means ranks 0 to 1"),
        ({"gpus": 2, "rank_faults": [FAULT | {"rank": -1}]}, "hardware.rank_faults has rank -1, but gpus=2"),
        ({"gpus": 2, "rank_faults": [FAULT, FAULT]}, "hardware.rank_faults has two entries for rank 1 on disk-cpu"),
        (
            {"gpus": 2, "rank_faults": [FAULT | {"link": "cpu"}]},
            "hardware.rank_faults must name one of cpu-gpu, .* as link, not cpu",
        ),
        ({"gpus": 2, "rank_faults": [FAULT | {"link": "cpu-gpu"}]}, "hardware.rank_faults can have a share only on links of the"),
        ({"gpus": 2, "rank_faults": [FAULT | {"share": 1.5}]}, "hardware.rank_faults.share must be from 0 to 1, not 1.5"),
        (
            {"gpus": 2, "rank_faults": [FAULT | {"speed": 0}]},
            "hardware.rank_faults.speed must be above 0 and at most 1, not 0",
        ),
        (
            {"gpus": 2, "rank_faults": [FAULT | {"share": 0}]},
            "hardware.rank_faults has an entry without a fault, rank 1 on disk-cpu",
        ),
        ({"gpus": 2, "rank_faults": [{"link": "disk-cpu"}]}, r"hardware.rank_faults\[0\].rank is missing"),
    ],
)
def test_settings_of_ranks_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        construct(HardwareSpec, ROUND | change, "hardware")


def test_ranks_have_settings_of_their_own() -> None:
    hardware = construct(HardwareSpec, ROUND | {"gpus": 2, "rank_jitter": 0.1, "rank_faults": [FAULT]}, "hardware")
    assert hardware.rank_jitter == 0.1
    assert hardware.rank_faults == [RankFault(rank=1, link="disk-cpu", speed=1.0, share=0.1)]


TERMS = {"fixed_s": 1.0, "prefill_token_s": 2.0, "decode_request_s": 10.0, "chunk_context_s": 0.5, "decode_context_s": 100.0}


def test_a_formula_gives_the_time_of_a_step_and_of_a_leap() -> None:
    model = ModelSpec(layers=1, hidden_size=1, vocabulary=1, heads=1, kv_heads=1, head_dim=1, mlp_width=1)
    steps = step_times(model, LinearHardware(**ROUND, **TERMS))
    work = Work(chunks=[(3, 4), (5, 0)], decode_requests=2, decode_context_tokens=7)
    assert steps.leap_s(work, 1) == 1 + 2 * (3 + 5) + 0.5 * (3 * 4) + 10 * 2 + 100 * 7
    work = Work(decode_requests=2, decode_context_tokens=7, max_steps=3)
    assert steps.leap_s(work, 3) == 3 * (1 + 10 * 2) + 100 * (7 + 9 + 11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_token_s": -1.0}, "prefill_token_s must be 0 or more, not -1.0"),
        ({"decode_context_s": float("nan")}, "decode_context_s must be a finite number of at least 0, not nan"),
        ({"fixed_s": 0.0, "decode_request_s": 0.0}, "fixed_s and decode_request_s are both 0: a decode step must take time"),
    ],
)
def test_a_formula_that_gives_no_times_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearHardware(**ROUND, **(TERMS | settings))
