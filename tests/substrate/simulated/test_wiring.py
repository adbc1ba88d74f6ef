"""Channels are made when one of those that they share a limit with is first asked for, and limited as if made all at once."""

from dataclasses import replace

import pytest

from kvsim.engine.layout import Layout
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.agenda import Agenda
from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.wiring import Wiring

HARDWARE = HardwareSpec(
    flops_per_s=1.0,
    memory_bytes=1000,
    memory_bytes_per_s=1.0,
    host_to_device_bytes_per_s=1000.0,
    device_to_host_bytes_per_s=1000.0,
    both_directions_bytes_per_s=2000.0,
    disk_read_bytes_per_s=100.0,
    disk_write_bytes_per_s=100.0,
    host_latency_s=0.0,
    disk_latency_s=0.0,
)
FOUR = Layout(hosts=(0, 0, 1, 1), disks=(0, 1, 2, 2))


def wiring(layout: Layout, host_memory_bytes_per_s: float | None = None) -> tuple[VirtualClock, Wiring]:
    clock = VirtualClock()
    hardware = replace(HARDWARE, host_memory_bytes_per_s=host_memory_bytes_per_s)
    agenda: Agenda = clock.agenda
    return clock, Wiring(agenda, hardware, 1, 1, layout, "fifo")


def arrival_s(clock: VirtualClock, wires: Wiring, sends: list[tuple[int, str]]) -> list[float]:
    flows = [wires.of_engine(engine)[name].send(1000.0) for engine, name in sends]
    for flow in flows:
        clock.run(flow.event)
    return [flow.ended_s for flow in flows]


@pytest.mark.parametrize(
    ("host_memory_bytes_per_s", "asked", "made"), [(None, 0, [0]), (None, 3, [2, 3]), (1500.0, 1, [0, 1]), (1500.0, 2, [2, 3])]
)
def test_only_engines_that_share_a_limit_get_their_channels_together(host_memory_bytes_per_s, asked, made):
    _, wires = wiring(FOUR, host_memory_bytes_per_s)
    wires.of_engine(asked)
    assert [engine for engine, channels in enumerate(wires._engines) if channels is not None] == made


def test_engines_of_a_disk_share_its_rate_whoever_is_asked_for_first():
    clock, wires = wiring(FOUR)
    assert arrival_s(clock, wires, [(3, "disk-gpu"), (2, "disk-gpu"), (0, "disk-gpu")]) == [20.0, 20.0, 10.0]


def test_engines_of_a_host_share_its_memory_whoever_is_asked_for_first():
    clock, wires = wiring(FOUR, 1000.0)
    assert arrival_s(clock, wires, [(1, "cpu-gpu"), (0, "cpu-gpu"), (2, "cpu-gpu")]) == [2.0, 2.0, 1.0]


def test_a_disk_asked_for_below_the_gpus_is_that_of_its_engines():
    _, wires = wiring(FOUR)
    below = wires.of_store(2, 1)["disk-cpu"]
    assert below is wires.of_engine(1)["disk-cpu"]


def test_lanes_name_all_channels_in_the_order_of_engines():
    _, late = wiring(FOUR)
    late.of_engine(2)
    _, early = wiring(FOUR)
    assert late.lanes() == early.lanes()
    assert [owner for name, owner in late.lanes() if name == "gpu-cpu"] == [0, 1, 2, 3]
