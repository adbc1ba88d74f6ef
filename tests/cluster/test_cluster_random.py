"""Any requests on any cluster of small engines: all end, nothing leaks, the same run twice is the same, failures included.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvsim.cluster.cluster import Failure
from kvsim.core.request import RESETS, Request, Reset
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.s3_fifo import S3FIFO
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.policies.prefetch.base import STOP_RULES
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.policies.routing.kv_aware import KVAware
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.routing.power_of_two import PowerOfTwo
from kvsim.policies.routing.prefix_aware import PrefixAware
from kvsim.policies.routing.random import RandomRouting
from kvsim.policies.routing.round_robin import RoundRobin
from kvsim.policies.routing.session_affinity import SessionAffinity
from kvsim.policies.scheduling.dfs_weight import DfsWeight
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.policies.scheduling.longest_prefix import LongestPrefix
from kvsim.policies.scheduling.priority import Priority
from kvsim.policies.scheduling.shortest_prefill import ShortestPrefill
from kvsim.policies.scheduling.shortest_prompt import ShortestPrompt
from tests.cluster.small_cluster import SmallCluster, small_cluster
from tests.engine.small import HARDWARE, PAGE_BYTES, PAGE_TOKENS, make_requests, same_outcome
from tests.engine.test_engine_random import PLACEMENTS, RATES, RUNS, SETTINGS, SPEEDS, asks
from tests.workloads import pages_of

ROUTINGS: list[Callable[[], Any]] = [
    RoundRobin,
    LeastLoaded,
    PowerOfTwo,
    SessionAffinity,
    RandomRouting,
    partial(PrefixAware, balance_abs_threshold=1),
    KVAware,
    partial(KVAware, staleness_s=3.0, router_temperature=0.5),
]
SCHEDULINGS: list[Callable[[], Any]] = [
    FCFS,
    LongestPrefix,
    DfsWeight,
    ShortestPrompt,
    ShortestPrefill,
    Priority,
    partial(Priority, max_wait_s=20.0),
]
EVICTIONS: list[Callable[[], Any]] = [LRU, LRU, FIFO, S3FIFO, SegmentedLRU]


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Requests with sessions, priorities, resets and, some of them, several samples."""
    requests = make_requests(draw(asks()))
    for request in requests:
        request.session = draw(st.integers(-1, 3))
        request.priority = draw(st.integers(0, 2))
        if request.output_tokens and draw(st.integers(0, 7)) == 0:
            request.samples = draw(st.integers(2, 3))
        if draw(st.integers(0, 11)) == 0:
            at_s = draw(st.sampled_from([float("nan"), request.arrival_s, 7.0]))
            request.resets = (Reset(draw(st.sampled_from(RESETS)), at_s),)
    return requests


@st.composite
def failure_plans(draw: st.DrawFn, engines: int) -> list[Failure]:
    """Failures one after another on each engine, all of which come back."""
    plan: list[Failure] = []
    for engine in range(engines):
        at_s = 0.0
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            at_s += draw(st.sampled_from([0.0, 1.5, 4.0, 17.0, 33.5, 80.0, 200.0])) + 0.25 * bool(plan)
            away_s = draw(st.sampled_from([0.5, 3.0, 40.0, 300.0]))
            plan.append(Failure(engine=engine, at_s=at_s, back_after_s=away_s))
            at_s += away_s + 0.125
    return sorted(plan, key=lambda failure: failure.at_s)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    """Rates of links and disks."""
    hardware = {name: HARDWARE[name] * draw(SPEEDS) for name in RATES}
    fastest = max(hardware["host_to_device_bytes_per_s"], hardware["device_to_host_bytes_per_s"])
    hardware |= {"both_directions_bytes_per_s": 1.2 * fastest, "host_latency_s": draw(st.sampled_from([0.0, 0.3]))}
    hardware["interconnect_bytes_per_s"] = PAGE_BYTES * draw(SPEEDS)
    hardware["interconnect_latency_s"] = draw(st.sampled_from([0.0, 0.3]))
    hardware["host_memory_bytes_per_s"] = draw(st.sampled_from([None, fastest]))
    return hardware


@st.composite
def prefetches(draw: st.DrawFn) -> Callable[[], Any]:
    """Makes a prefetch policy."""
    kind = draw(st.sampled_from([NoPrefetch, ThresholdPrefetch, AdaptivePrefetch]))
    if kind is NoPrefetch:
        return NoPrefetch
    return partial(
        kind,
        min_tokens=1,
        in_flight_fraction=draw(st.sampled_from([0.5, 1.0])),
        stop=draw(st.sampled_from(STOP_RULES)),
        base_s=draw(st.sampled_from([0.0, 3.0])),
        load_min_tokens=draw(st.sampled_from([0, 8])),
    )


@st.composite
def clusters(draw: st.DrawFn, *, with_failures: bool = True, most_engines: int = 4) -> Callable[[], SmallCluster]:
    """Makes the same small cluster again and again."""
    engines = draw(st.integers(1, most_engines))
    hosts = tuple(engine // draw(st.sampled_from([1, 2, 4])) for engine in range(engines))
    hosts = tuple(sorted({host: at for at, host in enumerate(dict.fromkeys(hosts))}[host] for host in hosts))
    tiers = draw(st.integers(1, 3))
    shape: dict[str, Any] = {
        "gpu": draw(st.integers(1, 14)),
        "cpu": draw(st.integers(1, 12)) if tiers > 1 else 0,
        "disk": draw(st.integers(1, 14)) if tiers > 2 else 0,
        "hosts": hosts,
        "is_cpu_divided": draw(st.booleans()),
        "is_disk_shared": draw(st.booleans()),
        "prefill": draw(st.integers(0, engines - 1)),
    }
    settings = {
        "max_batch_tokens": draw(st.sampled_from([3, 10, 1000])),
        "max_running_requests": draw(st.sampled_from([1, 3, 100])),
        "overlap": draw(st.sampled_from(["none", "layerwise"])),
        "links": draw(st.sampled_from(["fifo", "shared"])),
        "reset_at_s": draw(st.sampled_from([[], [], [9.0, 50.0]])),
    }
    routing, decode_routing = draw(st.sampled_from(ROUTINGS)), draw(st.sampled_from(ROUTINGS))
    policies = {
        "eviction": draw(st.sampled_from(EVICTIONS)),
        "placement": [draw(PLACEMENTS), draw(PLACEMENTS)],
        "prefetch": draw(prefetches()),
        "scheduling": draw(st.sampled_from(SCHEDULINGS)),
    }
    failures = draw(failure_plans(engines)) if with_failures else []
    hardware, recompute, cache_output = draw(machines()), draw(st.booleans()), draw(st.booleans())

    def make() -> SmallCluster:
        return small_cluster(
            **shape,
            **policies,
            routing=routing(),
            decode_routing=decode_routing(),
            failures=failures,
            hardware=hardware,
            recompute_last_token=recompute,
            cache_output=cache_output,
            settings=settings,
            is_checked=False,
        )

    return make


def divided(cluster: SmallCluster, requests: list[Request]) -> list[Request]:
    """The requests that a cluster can serve: with engines that only decode, each has one answer."""
    return [replace(request, samples=1) for request in requests] if cluster.hand_over is not None else requests


@SETTINGS
@given(make=clusters(), requests=workloads())
def test_every_request_ends_and_nothing_is_left_of_it(make: Callable[[], SmallCluster], requests: list[Request]) -> None:
    cluster = make()
    requests = divided(cluster, requests)
    outcome = cluster.serve_requests(requests)
    event(f"failures: {any(engine.outages for engine in cluster.engines)}")
    event(f"retractions: {outcome.retractions > 0}")
    event(f"handed over: {cluster.hand_over is not None}")
    event(f"prefetched: {outcome.prefetch['used_pages'] > 0}")
    check_rows(outcome, cluster)
    check_counts(outcome, cluster)


def check_rows(outcome: Outcome, cluster: SmallCluster) -> None:
    """Requests that fit have finished, and there are no more hits than in one cache that keeps everything."""
    capacity = cluster.engines[0].gpu.pool.capacity
    for request in outcome.requests:
        index = request.index
        pages = -(-(request.prompt_tokens + request.output_tokens) // PAGE_TOKENS)
        if request.samples > 1:
            pages = request.pages_with_all(pages, PAGE_TOKENS)
        assert (outcome.status[index] == FINISHED) == (pages <= capacity)
        assert (outcome.hit_pages[index] >= 0).all()
        if pages > capacity:
            assert not outcome.hit_pages[index].any()
            continue
        assert outcome.engine is not None and outcome.engine[index] >= 0
        assert 0 <= outcome.ttft_s[index] <= outcome.e2e_s[index]
        assert (outcome.phases_s[index] >= 0).all()
        assert abs(outcome.phases_s[index].sum() - outcome.ttft_s[index]) < 1e-6
    served = [request for request in outcome.requests if outcome.status[request.index] == FINISHED]
    pages = sum(request.prompt_pages for request in served)
    different = {page for request in served for page in pages_of(request.runs)}
    assert outcome.hit_pages.sum() <= pages - len(different), "each page is computed once at least"


def check_counts(outcome: Outcome, cluster: SmallCluster) -> None:
    """Bytes are whole pages, and every page that was prefetched was used or wasted."""
    prefetch = outcome.prefetch
    assert prefetch["used_pages"] + prefetch["wasted_pages"] == prefetch["fetched_pages"] <= outcome.placement["fetched_pages"]
    for link in outcome.links.values():
        assert link.busy_s >= 0 and link.bytes >= 0
    if not any(engine.outages for engine in cluster.engines):
        loaded = sum(link.bytes for name, link in outcome.links.items() if name in ("cpu-gpu", "disk-gpu"))
        assert loaded == outcome.placement["loaded_pages"] * PAGE_BYTES
    if outcome.engines:
        assert sum(use.failures for use in outcome.engines) == sum(len(engine.outages) for engine in cluster.engines)


@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 2))
@given(make=clusters(), requests=workloads())
def test_the_cache_is_right_after_every_transfer(make: Callable[[], SmallCluster], requests: list[Request]) -> None:
    cluster = make()
    for engine in cluster.engines:
        engine.is_checked = True
    cluster.serve_requests(divided(cluster, requests))


@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 5))
@given(make=clusters(), requests=workloads())
def test_the_same_run_twice_has_the_same_outcome(make: Callable[[], SmallCluster], requests: list[Request]) -> None:
    one, other = (cluster.serve_requests(divided(cluster, requests)) for cluster in (make(), make()))
    assert same_outcome(one, other)
    assert np.array_equal(one.engine, other.engine) and np.array_equal(one.decoder, other.decoder)
    assert one.engines == other.engines
