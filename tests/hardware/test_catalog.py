"""The catalogue of machines, drives and network cards: each says where its numbers are from, and each can be simulated."""

from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvsim.commands.help import describe
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.plans.construct import construct
from kvsim.plans.plan import Plan
from kvsim.report.comparison.differing import differing, labels
from kvsim.run import play
from kvsim.settings.catalog import read_choice, source_of
from tests import composing

CONF = Path(__file__).parent.parent.parent / "conf"
MARK = "from data sheets until calibrated"
FORMULA = "linear"
"""The one that is no machine: its times are a formula."""
TINY = ("trace.limit=4", "model.layers=8", "tiers.gpu.capacity=4000pages")
DISK = ("tiers.cpu.capacity=100pages", "tiers.disk.capacity=200pages")
REMOTE = ("tiers.cpu.capacity=100pages", "tiers.remote.capacity=200pages", "tiers.remote.below=cpu")
PAIR = ("cluster.prefill=1", "cluster.decode=1")


def files(*groups: str) -> list[Path]:
    """The files of groups, one from each choice."""
    return sorted(path for group in groups for path in (CONF / group).glob("*.yaml") if path.stem != FORMULA)


def machine(path: Path) -> HardwareSpec:
    return construct(HardwareSpec, OmegaConf.to_container(OmegaConf.load(path)), "hardware")


def simulated(*overrides: str) -> Plan:
    return composing.plan(*TINY, *overrides, command="simulate")


def each_of(*paths: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: f"{path.parent.name}={path.stem}")


MACHINES, DRIVES, CARDS = files("hardware"), files("drive"), files("network")
FROM_DATA_SHEETS = [path for path in MACHINES if MARK in path.read_text().replace("\n# ", " ")]


@each_of(*MACHINES, *DRIVES, *CARDS)
def test_every_file_names_its_source_with_a_date_and_says_whether_it_is_measured(path: Path) -> None:
    comment = " ".join(read_choice(path)[0].split())
    assert source_of(comment), "Source: DOCUMENT. Date: YYYY-MM."
    assert MARK in comment or "measured by kvsim calibrate" in comment


def test_the_catalogue_has_what_it_promises() -> None:
    assert {"a100", "b200", "gb200", "h100", "h200", "l40s", "mi300x", "rtx4090"} == {path.stem for path in FROM_DATA_SHEETS}
    assert (len(DRIVES), len(CARDS)) == (3, 2)


def test_a_source_is_found_in_wrapped_lines_and_only_with_its_date() -> None:
    assert (
        source_of("A card.\nSource: Vendor, version 2.01\ndata sheet. Date: 2024-03.\nMore.")
        == "Vendor, version 2.01 data sheet, 2024-03"
    )
    assert source_of("A card. Source: Vendor data sheet.") == source_of("Date: 2024.") == ""


@each_of(*FROM_DATA_SHEETS)
def test_a_machine_from_data_sheets_is_physically_possible(path: Path) -> None:
    found = machine(path)
    assert 100 <= found.flops_per_s / found.memory_bytes_per_s <= 450, "FLOPs a byte at which both sides of the roofline meet"
    assert 10e-3 <= found.memory_bytes / found.memory_bytes_per_s <= 70e-3, "seconds to read the whole memory"
    assert 0.4 <= found.flops_efficiency * found.memory_efficiency <= 1.0
    one_way = found.host_to_device_bytes_per_s
    assert one_way < found.both_directions_bytes_per_s <= 2 * one_way
    assert found.allreduce_bytes_per_s is not None
    assert found.allreduce_bytes_per_s < found.memory_bytes_per_s
    assert found.interconnect_bytes_per_s <= found.allreduce_bytes_per_s * 1.1
    assert 1e-6 <= found.allreduce_latency_s <= 1e-5


@each_of(*FROM_DATA_SHEETS)
def test_a_machine_is_faster_the_nearer_the_bytes_are(path: Path) -> None:
    found = machine(path)
    rates = (
        found.memory_bytes_per_s,
        found.both_directions_bytes_per_s,
        found.host_to_device_bytes_per_s,
        found.disk_read_bytes_per_s,
    )
    assert all(near > far for near, far in pairwise(rates))


@each_of(*DRIVES)
def test_a_drive_keeps_within_its_bus_and_replaces_that_of_the_machine(path: Path) -> None:
    with_drive = simulated(*DISK, f"drive={path.stem}").hardware
    lane = {"4": 16e9 / 8 * 128 / 130, "5": 32e9 / 8 * 128 / 130}
    generation = next(number for number in lane if f"PCIe {number} x4" in read_choice(path)[0])
    assert 1e9 < with_drive.disk_write_bytes_per_s < with_drive.disk_read_bytes_per_s < 4 * lane[generation]
    assert 5e-5 <= with_drive.disk_latency_s <= 2e-4
    assert with_drive.disk_read_bytes_per_s != simulated(*DISK).hardware.disk_read_bytes_per_s


def test_a_drive_replaces_what_was_measured_of_another_one() -> None:
    assert simulated(*DISK, "hardware=h200_measured").hardware.disk_curves is not None
    assert simulated(*DISK, "hardware=h200_measured", "drive=pm9a3").hardware.disk_curves is None


def test_a_setting_of_the_command_line_goes_before_a_drive() -> None:
    assert simulated(*DISK, "drive=pm9a3", "hardware.disk_read_bytes_per_s=1e9").hardware.disk_read_bytes_per_s == 1e9


@each_of(*CARDS)
def test_a_card_carries_nine_tenths_of_its_line_rate_between_engines_and_to_the_store(path: Path) -> None:
    gigabits = float(read_choice(path)[0].partition(" Gbit/s")[0].rpartition(" ")[2])
    pair, store = simulated(*PAIR, f"network={path.stem}").hardware, simulated(*REMOTE, f"network={path.stem}").hardware
    assert store.remote is not None
    assert pair.interconnect_bytes_per_s == store.remote.bytes_per_s == pytest.approx(0.9 * gigabits * 1e9 / 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drive=pm9a3"], "drive has no effect without a disk tier: set tiers.disk.capacity"),
        (
            ["network=connectx7"],
            "network has no effect without a remote tier, without prefill and decode engines",
        ),
        (["hardware.allreduce_steps=2"], "hardware.allreduce_steps has no effect with one GPU: set hardware.gpus"),
        (
            ["hardware.gpus=2", "hardware.allreduce_bytes_per_s=null", "hardware.allreduce_latency_s=0.0"],
            "hardware.allreduce_latency_s has no effect without a rate: set hardware.allreduce_bytes_per_s",
        ),
    ],
)
def test_what_has_no_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulated(*overrides)


@pytest.mark.parametrize("name", ["drive=pm9a3", "network=connectx7"])
def test_a_replay_that_reads_no_rates_refuses_them_too(name: str) -> None:
    with pytest.raises(UsageError, match="has no effect on kvsim replay: leave it out"):
        composing.plan(*TINY, *DISK, name)


def test_a_validation_on_this_machines_gpus_is_without_communication() -> None:
    two = ("hardware=h100", "hardware.gpus=2")
    assert simulated(*two).hardware.communicates
    assert not composing.plan(*TINY, *two, command="validate").hardware.communicates
    with pytest.raises(UsageError, match=r"hardware\.allreduce_steps has no effect on kvsim validate: leave it out"):
        composing.plan(*TINY, *two, "hardware.allreduce_steps=2", command="validate")


@pytest.mark.parametrize(("topic", "shown"), [("hardware", "MI300X"), ("drive", "9550 MAX"), ("network", "ConnectX-7")])
def test_help_names_the_sources(topic: str, shown: str) -> None:
    text = " ".join(" ".join(describe([topic])).split())
    assert shown in text
    assert all(source_of(read_choice(path)[0]) in text for path in files(topic))


def test_runs_with_two_drives_differ_in_the_drive_alone() -> None:
    settings = []
    for name in ("pm9a3", "micron_9550"):
        config = OmegaConf.to_container(composing.composed(*TINY, *DISK, f"drive={name}", "output=out"), resolve=True)
        assert isinstance(config, dict)
        settings.append(labels({str(key): value for key, value in config.items()}, {"hardware": "h200", "drive": name}))
    assert differing(settings) == ["drive"]


CHOICES: list[tuple[str, ...]] = [
    *[(f"hardware={path.stem}", "hardware.gpus=2") for path in MACHINES],
    *[(f"drive={path.stem}", *DISK) for path in DRIVES],
    *[(f"network={path.stem}", *REMOTE) for path in CARDS],
    *[(f"network={path.stem}", *PAIR) for path in CARDS],
]


def first_tokens_s(*overrides: str) -> list[float]:
    """The time to first token of each request of a tiny simulation."""
    tiny = simulated(*overrides)
    requests = tiny.trace.load(tiny.page_tokens).requests
    return [float(seconds) for seconds in play.simulate(tiny, requests).ttft_s]


@pytest.mark.parametrize("overrides", CHOICES, ids=lambda overrides: f"{overrides[0]} {overrides[1]}")
def test_every_choice_runs_a_tiny_simulation(overrides: tuple[str, ...]) -> None:
    found = first_tokens_s(*overrides)
    assert len(found) == 4 and all(seconds > 0 for seconds in found)


def test_two_gpus_that_communicate_take_longer() -> None:
    two = ("hardware=h100", "hardware.gpus=2")
    assert sum(first_tokens_s(*two)) > sum(first_tokens_s(*two, "hardware.allreduce_bytes_per_s=null"))
