"""Engines that share tiers, reckoned by hand. See small.py and small_cluster.py for the round numbers."""

from random import Random
from typing import Any

import numpy as np
import pytest

from kvsim.engine.outcome import Outcome
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.routing.round_robin import RoundRobin
from kvsim.policies.routing.session_affinity import SessionAffinity
from tests.cluster.small_cluster import Sent, SmallCluster, alone, small_cluster
from tests.engine.small import ask, eager, hits, make_requests, seconds, small_engine

A, B, C = "abcd", "efgh", "ijkl"


def bytes_on(outcome: Outcome, link: str, owner: int) -> int:
    """What one engine's link, or one disk, has carried."""
    return sum(lane.bytes for lane in outcome.link_lanes if (lane.name, lane.owner) == (link, owner))


# --- shared and divided tiers ---


def test_what_one_engine_wrote_down_is_a_hit_for_another_on_its_host() -> None:
    """A is on engine 0 at 17 and in the CPU tier at 21. Engine 1 loads 4 pages from 30 to 34; the last layer takes 0.25 s."""
    outcome = small_cluster(gpu=8, cpu=20, routing=Sent(0, 1)).serve(ask(A), ask(A, 30))
    assert hits(outcome, 1) == (0, 4, 0)
    assert outcome.ttft_s.tolist() == seconds([17, 4.25])
    assert outcome.engine is not None and outcome.engine.tolist() == [0, 1]


def test_pages_still_on_their_way_down_are_no_hit_for_another_engine() -> None:
    """At 18, the copy of A that runs from 17 to 21 has not arrived."""
    outcome = small_cluster(gpu=8, cpu=20, routing=Sent(0, 1)).serve(ask(A), ask(A, 18))
    assert hits(outcome, 1) == (0, 0, 0)
    assert outcome.ttft_s[1] == seconds(17)


@pytest.mark.parametrize("shape", [{"is_cpu_divided": True}, {"hosts": (0, 1)}])
def test_engines_with_cpu_tiers_of_their_own_find_nothing_of_each_other(shape: dict[str, Any]) -> None:
    outcome = small_cluster(gpu=8, cpu=20, routing=Sent(0, 1), **shape).serve(ask(A), ask(A, 30))
    assert hits(outcome, 1) == (0, 0, 0)


@pytest.mark.parametrize(("shape", "expected"), [({"is_disk_shared": True}, (0, 0, 4)), ({}, (0, 0, 0))])
def test_a_disk_serves_its_host_or_all_of_the_cluster(shape: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """A is in CPU 0 at 21, on the disk at 29. Engine 1, on another host, reads it from 40 to 48 and loads it until 52."""
    cluster = small_cluster(gpu=8, cpu=20, disk=20, hosts=(0, 1), routing=Sent(0, 1), **shape)
    outcome = cluster.serve(ask(A), ask(A, 40))
    assert hits(outcome, 1) == expected
    assert outcome.ttft_s[1] == seconds(12.25 if sum(expected) else 17)


def test_a_disk_of_the_host_serves_engines_whose_cpu_tiers_are_divided() -> None:
    cluster = small_cluster(gpu=8, cpu=20, disk=20, is_cpu_divided=True, routing=Sent(0, 1))
    assert hits(cluster.serve(ask(A), ask(A, 40)), 1) == (0, 0, 4)


def test_engines_load_over_links_of_their_own() -> None:
    """Both load 4 pages from the CPU tier at the same time, each in 4 s."""
    cluster = small_cluster(gpu=4, cpu=20, hosts=(0, 0, 0), routing=Sent(2, 0, 1))
    outcome = cluster.serve(ask(A, tokens=0), ask(A, 30, tokens=0, output=0), ask(A, 30, tokens=0, output=0))
    assert outcome.status.tolist() == [1, 0, 0], "16 tokens and one more need 5 pages"
    cluster = small_cluster(gpu=8, cpu=20, hosts=(0, 0, 0), routing=Sent(2, 0, 1))
    outcome = cluster.serve(ask(A), ask(A, 30), ask(A, 30))
    assert outcome.ttft_s.tolist() == seconds([17, 4.25, 4.25])
    assert bytes_on(outcome, "cpu-gpu", 0) == bytes_on(outcome, "cpu-gpu", 1) == 4 * 64
    assert bytes_on(outcome, "cpu-gpu", 2) == 0


def test_engines_share_the_rate_of_their_hosts_memory_if_it_is_given() -> None:
    """Two links of 64 bytes/s over a memory of 64 bytes/s: each carries 4 pages in 8 s."""
    cluster = small_cluster(gpu=8, cpu=20, hosts=(0, 0, 0), routing=Sent(2, 0, 1), hardware={"host_memory_bytes_per_s": 64.0})
    assert cluster.serve(ask(A), ask(A, 30), ask(A, 30)).ttft_s.tolist() == seconds([17, 8.25, 8.25])


def test_hosts_share_a_disk_one_read_after_another() -> None:
    """A and B are on the disk; hosts 1 and 2 read 4 pages each from 60 on, at half the rate: until 76, then 4 s on links."""
    cluster = small_cluster(
        gpu=10, cpu=20, disk=20, hosts=(0, 1, 2), is_disk_shared=True, routing=Sent(0, 0, 1, 2), settings={"links": "shared"}
    )
    outcome = cluster.serve(ask(A), ask(B, 18), ask(A, 60), ask(B, 60))
    assert hits(outcome, 2) == hits(outcome, 3) == (0, 0, 4)
    assert outcome.ttft_s[2:].tolist() == seconds([20.25, 20.25])


def test_a_page_that_another_engine_uses_is_no_more_recently_used_here() -> None:
    """Engine 0 has A, then B. Engine 1 uses A, and engine 0 needs room for C: A leaves all the same."""
    cluster = small_cluster(gpu=10, cpu=30, routing=Sent(0, 0, 1, 0, 0))
    outcome = cluster.serve(ask(A), ask(B, 30), ask(A, 60), ask("ij", 80), ask(B, 100))
    assert hits(outcome, 2) == (0, 4, 0)
    assert hits(outcome, 4) == (4, 0, 0)
    cluster = small_cluster(gpu=10, cpu=30, routing=Sent(0, 0, 0, 0, 0))
    outcome = cluster.serve(ask(A), ask(B, 30), ask(A, 60), ask("ij", 80), ask(B, 100))
    assert hits(outcome, 2) == (4, 0, 0)
    assert outcome.hit_pages[4].tolist() != [4, 0, 0], "one engine that uses A itself gives up B's pages"


def test_write_back_writes_down_what_only_another_gpu_has_besides() -> None:
    """Both engines have A. Engine 0 needs all of its pages for B: A is written down, and a third engine finds it."""
    cluster = small_cluster(gpu=5, cpu=20, hosts=(0, 0, 0), placement=WriteBack, routing=Sent(0, 1, 0, 2))
    outcome = cluster.serve(ask(A), ask(A), ask(B, 30), ask(A, 70))
    assert bytes_on(outcome, "gpu-cpu", 0) == 4 * 64
    assert hits(outcome, 3) == (0, 4, 0)


# --- engines that share nothing ---

ARRAYS = ("status", "hit_pages", "arrival_s", "ttft_s", "tpot_s", "e2e_s", "read_s", "queue_s", "load_s", "retractions")


def check_independent(cluster: SmallCluster, asks: list[Any], sessions: list[int], **form: Any) -> None:
    """Every engine does what it would do alone with the requests that it got."""
    requests = make_requests(asks)
    for request, session in zip(requests, sessions, strict=True):
        request.session = session
    outcome = cluster.serve_requests(requests)
    assert outcome.engine is not None and (outcome.status == 0).all()
    for engine in cluster.engines:
        numbers = np.flatnonzero(outcome.engine == engine.number)
        single = small_engine(**form).run(alone(requests, numbers.tolist()))
        for name in ARRAYS:
            assert np.array_equal(single.columns[name], outcome.columns[name][numbers], equal_nan=name.endswith("_s")), name
        use = outcome.engines[engine.number]
        assert (use.retractions, use.evicted_pages) == (single.retractions, single.tiers["gpu"].evicted_pages)
        for name, link in single.links.items():
            lane = next(lane for lane in outcome.link_lanes if (lane.name, lane.owner) == (name, engine.number))
            assert (lane.bytes, lane.transfers, lane.busy_s) == (link.bytes, link.transfers, link.busy_s)


@pytest.mark.parametrize("seed", range(12))
def test_engines_that_share_nothing_are_independent(seed: int) -> None:
    rng = Random(seed)
    words = ["abcd", "abef", "xyzw", "abcdefg", "pq", "pqrs"]
    asks = [ask(rng.choice(words), rng.randrange(900) * 0.5, output=rng.randrange(12)) for _ in range(60)]
    asks.sort(key=lambda one: one.at)
    sessions = [rng.randrange(-1, 6) for _ in asks]
    tiers: dict[str, int] = rng.choice([{}, {"cpu": 9}, {"cpu": 7, "disk": 16}])
    hosts = (0, 0, 0) if tiers.get("disk", 0) == 0 else (0, 1, 2)
    placement = rng.choice([WriteBack, small_engine.__kwdefaults__["placement"]])
    settings: dict[str, Any] = {
        "overlap": rng.choice(["layerwise", "none"]),
        "links": rng.choice(["fifo", "shared"]),
        "max_batch_tokens": rng.choice([5, 1000]),
    }
    cluster = small_cluster(
        gpu=11, hosts=hosts, is_cpu_divided=True, placement=placement, prefetch=eager if "disk" in tiers else NoPrefetch,
        routing=rng.choice([RoundRobin, SessionAffinity])(), settings=settings, **tiers,
    )  # fmt: skip
    prefetch = eager() if "disk" in tiers else None
    check_independent(cluster, asks, sessions, gpu=11, placement=placement, prefetch=prefetch, **tiers, **settings)
