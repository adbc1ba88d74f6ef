"""A tier in a store over the network that all hosts share: its times, its bytes, who finds what in it, and wrong settings."""

from functools import cache
from typing import Any

import pytest

import kvsim
from kvsim.engine.layout import ONE_ENGINE
from kvsim.errors import UsageError
from kvsim.hardware.spec import RemoteStore
from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.wiring import Wiring
from kvsim.trace.base import Trace
from tests.core.small import MACHINE

SMALL = ("tiers.gpu.capacity=150pages", "tiers.cpu.capacity=200pages")
BELOW = (*SMALL, "tiers.disk.capacity=300pages", "tiers.remote.capacity=20000pages")
BESIDE = (*BELOW, "tiers.remote.below=cpu")
WITHOUT_DISK = (*SMALL, "tiers.remote.capacity=20000pages", "tiers.remote.below=cpu")
PAGE_BYTES = 64 * 131072


def record(command: str, *overrides: str) -> dict[str, Any]:
    run = kvsim.replay if command == "replay" else kvsim.simulate
    return run(sessions(), *overrides).record


@cache
def sessions() -> Trace:
    return kvsim.load_trace("synthetic", page_tokens=64, sessions=40, rate=1)


# --- times --------------------------------------------------------------------------------------------------------------


def sent_s(store: RemoteStore, link: str, pages: int) -> float:
    """Seconds that pages of 250 bytes take; the disk of the machine reads 100 bytes a second."""
    env = VirtualClock()
    hardware = MACHINE.__class__(**{**vars_of(MACHINE), "remote": store, "disk_latency_s": 0.25})
    wiring = Wiring(env.agenda, hardware, 250, 1, ONE_ENGINE, "fifo")
    env.run(wiring.stores[3, 0][link].send(pages * 250.0, 250).event)
    return float(env.now)


def vars_of(hardware: Any) -> dict[str, Any]:
    return {name: getattr(hardware, name) for name in type(hardware).__dataclass_fields__}


def test_bandwidth_limits_a_read() -> None:
    """2 pages of 250 bytes at 1000 bytes a second, after half a second."""
    assert sent_s(RemoteStore(bytes_per_s=1000, latency_s=0.5), "remote-cpu", 2) == pytest.approx(0.5 + 0.5)


def test_requests_limit_a_read_and_a_write() -> None:
    """A page is 3 objects of at most 100 bytes; at 2 objects a second it takes 1.5 s, though the network needs 0.25 s."""
    store = RemoteStore(bytes_per_s=1000, latency_s=0.5, requests_per_s=2, object_bytes=100)
    assert sent_s(store, "remote-cpu", 2) == pytest.approx(0.5 + 2 * 1.5)
    assert sent_s(store, "cpu-remote", 2) == pytest.approx(0.5 + 2 * 1.5)


def test_a_page_is_one_object_by_default() -> None:
    assert sent_s(RemoteStore(bytes_per_s=1000, latency_s=0, requests_per_s=2), "remote-cpu", 3) == pytest.approx(3 * 0.5)


def test_what_leaves_the_disk_is_written_no_faster_than_the_disk_reads() -> None:
    """2 pages at 100 bytes a second, after both latencies."""
    assert sent_s(RemoteStore(bytes_per_s=1000, latency_s=0.5), "disk-remote", 2) == pytest.approx(0.25 + 0.5 + 5.0)


# --- pages and bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "write", "placement"),
    [
        *[(BELOW, "disk-remote", placement) for placement in ("write_through", "write_back", "exclusive")],
        (WITHOUT_DISK, "cpu-remote", "write_through"),
        (BESIDE, "cpu-remote", "write_through"),  # what the CPU evicts, a disk beside the store takes
    ],
)
def test_bytes_of_a_link_are_those_of_its_pages(shape: tuple[str, ...], write: str, placement: str) -> None:
    result = record("simulate", *shape, f"placement={placement}", "prefetch=threshold", "prefetch.min_tokens=1")
    remote, links = result["tiers"]["remote"], result["links"]
    assert result["hit_pages"]["remote"] > 0
    assert links["remote-cpu"]["bytes"] >= result["hit_pages"]["remote"] * PAGE_BYTES
    assert links["remote-cpu"]["bytes"] % PAGE_BYTES == 0
    assert 0 < remote["inserted_pages"] * PAGE_BYTES <= links[write]["bytes"]
    assert set(result["hit_pages"]) == {"gpu", "cpu", "disk", "remote"}


@pytest.mark.parametrize("shape", [BELOW, BESIDE, WITHOUT_DISK])
def test_a_replay_hits_more_with_the_store(shape: tuple[str, ...]) -> None:
    with_store, without = record("replay", *shape), record("replay", *[each for each in shape if "remote" not in each])
    assert sum(with_store["hit_pages"].values()) > sum(without["hit_pages"].values())
    assert "remote" not in without["hit_pages"] and "remote" not in without["config"]["tiers"]


def test_a_host_finds_what_another_one_has_written() -> None:
    """Turns of a session go to either host. Without a store, they reuse only what their own host has."""
    cluster = ("cluster.engines=2", "cluster.engines_per_host=1", "routing=round_robin", "placement=write_through")
    shared = record("simulate", *WITHOUT_DISK, *cluster)
    alone = record("simulate", *SMALL, *cluster)
    on_both = [engine["hit_tokens"]["remote"] for engine in shared["engines"]]
    assert min(on_both) > 0
    assert shared["hit_rate"] > alone["hit_rate"]
    assert shared["tiers"]["remote"]["capacity_pages"] == 20000, "one store, not one per host"


def test_a_sweep_over_the_capacity() -> None:
    sizes = [f"{pages}pages" for pages in (100, 1000, 20000)]
    table = kvsim.sweep(sessions(), {"tiers.remote.capacity": sizes}, *SMALL, "tiers.remote.below=cpu")
    tokens = [run.record["hit_tokens"]["remote"] for run in table.runs]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1]


# --- wrong settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tiers.remote.bytes_per_s=3"], "tiers.remote.bytes_per_s has no effect without that tier: set tiers.remote.capacity"),
        (["tiers.remote.below=cpu"], "tiers.remote.below has no effect without that tier"),
        (["tiers.remote.capacity=9pages"], "tiers.remote needs a disk tier above it: set tiers.disk.capacity, or tiers.remote"),
        (["tiers.remote.capacity=9pages", "tiers.disk.capacity=9pages", "tiers.disk.below=gpu"], "set tiers.disk.below=cpu or"),
        (["tiers.remote.capacity=9pages", "tiers.remote.below=cpu", "tiers.remote.object_bytes=9"], "set requests_per_s"),
        (["tiers.remote.capacity=9pages", "tiers.remote.below=cpu", "tiers.remote.bytes_per_s=0"], "tiers.remote.bytes_per_s"),
        (["tiers.remote.capacity=9pages", "tiers.remote.below=cpu", "substrate=hardware"], "has no remote store: set tiers.rem"),
        (["tiers.remote.capacity=9pages", "tiers.remote.below=gpu"], "tiers.remote.below must be disk or cpu, not gpu"),
        (["tiers.remote.capacity=9pages", "tiers.remote.below=cpu", "preset=vllm"], "vLLM's rules have no remote tier"),
    ],
)
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        kvsim.simulate(sessions(), "tiers.gpu.capacity=90pages", "tiers.cpu.capacity=90pages", *overrides)


def test_a_store_needs_the_cpu_tier() -> None:
    with pytest.raises(UsageError, match="needs a CPU tier"):
        kvsim.replay(sessions(), "tiers.remote.capacity=9pages", "tiers.remote.below=cpu")


def test_rates_have_no_effect_on_a_replay() -> None:
    with pytest.raises(UsageError, match=r"tiers\.remote\.latency_s has no effect on kvsim replay"):
        kvsim.replay(sessions(), *WITHOUT_DISK, "tiers.remote.latency_s=1")
