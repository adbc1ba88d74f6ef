"""Engines small enough to follow by hand, in round numbers.

a token takes 1 s to compute, whatever its context     a page has 4 tokens and takes 4 s
a page takes 1 s on the host link, either way          2 s to or from the disk
the model has 4 layers                                 nothing has latency or overhead unless a test says so

A prompt is a word, a page for each letter, and one token more, which is always computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvsim.cluster.cluster import Cluster
from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.transfer import Transfer
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.core.small import make_tiers
from tests.workloads import Words

PAGE_TOKENS = 4
PAGE_BYTES = 64
LAYERS = 4
FOREVER = 1e30
"""A rate at which nothing takes time."""

MODEL = ModelSpec(layers=LAYERS, hidden_size=1000, vocabulary=1, heads=1, kv_heads=1, head_dim=1, mlp_width=10**9)
"""Nearly all of its FLOPs are in the MLP: attention over 1,000 tokens adds less than 1e-9."""

HARDWARE: dict[str, Any] = {
    "flops_per_s": MODEL.linear_flops_per_token,
    "memory_bytes": 1,
    "memory_bytes_per_s": FOREVER,
    "host_to_device_bytes_per_s": PAGE_BYTES,
    "device_to_host_bytes_per_s": PAGE_BYTES,
    "both_directions_bytes_per_s": 2 * PAGE_BYTES,
    "disk_read_bytes_per_s": PAGE_BYTES / 2,
    "disk_write_bytes_per_s": PAGE_BYTES / 2,
    "host_latency_s": 0.0,
    "disk_latency_s": 0.0,
    "step_overhead_s": 0.0,
}
assert MODEL.page_bytes(PAGE_TOKENS) == PAGE_BYTES

STEP_READS = {"flops_per_s": FOREVER, "memory_bytes_per_s": MODEL.weight_bytes(1)}
"""Hardware on which a step takes 1 s, whatever is in it: reading the weights is all that counts."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request before its pages are numbered."""

    word: str
    at: float
    tokens: int
    output: int
    after: int
    delay_s: float
    joins: tuple[int, ...] = ()


def ask(
    word: str,
    at: float = 0.0,
    *,
    tokens: int = 1,
    output: int = 1,
    after: int = -1,
    joins: tuple[int, ...] = (),
    delay_s: float = 0.0,
) -> Ask:
    """A prompt of the pages of ``word`` and ``tokens`` more; with ``after``, it waits for the request of that number, and for
    those of ``joins``."""
    return Ask(word=word, at=at, tokens=tokens, output=output, after=after, joins=joins, delay_s=delay_s)


def make_requests(asks: Sequence[Ask], page_tokens: int = PAGE_TOKENS) -> list[Request]:
    """Requests numbered as given. Equal beginnings of two words are the same pages."""
    words = Words()
    return [
        words.request(
            one.word, page_tokens=page_tokens, tail=one.tokens, output=one.output,
            index=index, arrival_s=one.at, after=one.after, joins=one.joins, delay_s=one.delay_s,
        )
        for index, one in enumerate(asks)
    ]  # fmt: skip


class SmallEngine(Engine):
    """An engine that may check its cache after the end of every transfer."""

    substrate: SimulatedSubstrate
    is_checked = False

    def run(self, requests: list[Request], advance: Callable[[int], None] | None = None) -> Outcome:
        """Serve the requests with this engine alone."""
        return Cluster([self]).run(requests, advance)

    def serve(self, *asks: Ask) -> Outcome:
        """Serve the requests; afterwards nothing is left of them but what is cached."""
        outcome = self.run(make_requests(asks, self.cache.page_tokens))
        check_idle(self)
        return outcome

    def _landed(self, transfer: Transfer) -> None:
        super()._landed(transfer)
        if self.is_checked:
            self.cache.check()


def small_engine(
    *,
    gpu: int | None,
    cpu: int | None = 0,
    disk: int | None = 0,
    eviction: Callable[[], Any] = LRU,
    placement: Callable[[], Any] | Sequence[Callable[[], Any]] = WriteThrough,
    prefetch: PrefetchPolicy | None = None,
    scheduling: SchedulingPolicy | None = None,
    page_tokens: int = PAGE_TOKENS,
    recompute_last_token: bool = True,
    cache_output: bool = False,
    cache_chunks: bool = True,
    hardware: dict[str, Any] | None = None,
    make_substrate: type[SimulatedSubstrate] = SimulatedSubstrate,
    **settings: Any,
) -> SmallEngine:
    """An engine over one to three tiers; ``hardware`` changes the round numbers, ``settings`` are the engine's."""
    capacities = [capacity for capacity in (gpu, cpu, disk) if capacity != 0]
    placements = [make() for make in (placement if isinstance(placement, Sequence) else [placement] * 2)]
    tiers, edges = make_tiers(capacities, [eviction() for _ in range(3)], placements, slots=False, page_tokens=page_tokens)
    rules = Rules(recompute_last_token=recompute_last_token, cache_output=cache_output, cache_chunks=cache_chunks)
    cache = Cache(tiers, edges, rules, page_tokens)
    policy = prefetch or NoPrefetch()
    machine = HardwareSpec(**(HARDWARE | (hardware or {})))
    if len(tiers) > 1:
        policy.bind(
            PolicyContext(
                tier=1, tier_name="cpu", capacity_pages=capacities[1], page_tokens=page_tokens, model=MODEL, hardware=machine
            )
        )
    engine = EngineSettings(**settings)
    substrate = make_substrate(MODEL, machine, page_tokens, links=engine.links)
    prefetching, in_flight = Prefetching(cache, policy, Offer), machine.pipeline_parallel
    return SmallEngine(substrate, cache, prefetching, engine, scheduling or FCFS(), steps_in_flight=in_flight)


def eager(**settings: Any) -> ThresholdPrefetch:
    """A prefetch of anything, if the CPU tier can hold it."""
    return ThresholdPrefetch(
        **{"min_tokens": 1, "in_flight_fraction": 1.0, "load_min_tokens": 0, "per_1024_tokens_s": 0.0} | settings
    )


def seconds(expected: Any) -> Any:
    """Compares with times that were reckoned by hand."""
    return pytest.approx(expected, abs=1e-6, nan_ok=True)


def hits(outcome: Outcome, index: int) -> tuple[int, ...]:
    """Pages of a request that came from gpu, cpu and disk."""
    return tuple(outcome.hit_pages[index].tolist())


def check_idle(engine: SmallEngine) -> None:
    """Assert that nothing is held, reserved or awaited any more, and that every pool adds up."""
    cache = engine.cache
    cache.check()
    assert not cache.leases and not cache.in_flight and not cache.residency.doomed and not cache.transfers.fetch_pins
    assert not any(sum(node.pins) for node in [cache.tree.root, *cache.tree.root.descendants()][1:])
    for tier in cache.tiers:
        assert tier.reserved_pages == tier.leaving_pages == 0
        assert tier.evictable_pages == tier.pool.capacity - tier.pool.free
    waiting, running = engine.waiting, engine.running
    assert not waiting.queue and not waiting.fetching and not engine.frontend._followers
    assert not running.admitted and not running.claims
    assert not any(group.jobs or group.context_tokens or group.is_flying for group in running.groups)
    assert engine.prefetching.in_flight_pages == 0
    assert not engine.substrate.flows and not any(engine.mover._lines)


def counted(outcome: Outcome) -> dict[str, int]:
    """What became of prefetched pages: the counts that are not 0."""
    return {name.removesuffix("_pages"): pages for name, pages in outcome.prefetch.items() if pages}


def bytes_moved(outcome: Outcome) -> dict[str, int]:
    """Bytes by kind of movement: written down, loaded to the GPU, fetched from disk."""
    links = {name: link.bytes for name, link in outcome.links.items()}
    return {
        "written": links.get("gpu-cpu", 0) + links.get("cpu-disk", 0),
        "loaded": links.get("cpu-gpu", 0),
        "fetched": links.get("disk-cpu", 0),
    }


def same_outcome(one: Outcome, other: Outcome) -> bool:
    """Whether two runs agree in everything but the time that they really took."""
    names = ("status", "hit_pages", "arrival_s", "ttft_s", "tpot_s", "e2e_s")
    same_arrays = all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name.endswith("_s")) for name in names)
    counts = ("tiers", "prefetch", "placement", "checkpoints", "retractions", "simulated_s")
    same_counts = all(getattr(one, name) == getattr(other, name) for name in counts)
    same_links = one.links.keys() == other.links.keys() and all(
        (use.bytes, use.transfers, use.busy_s) == (other.links[name].bytes, other.links[name].transfers, other.links[name].busy_s)
        and np.array_equal(use.intervals, other.links[name].intervals)
        for name, use in one.links.items()
    )
    return same_arrays and same_counts and same_links
