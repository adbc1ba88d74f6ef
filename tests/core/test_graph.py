"""Several GPUs above one CPU tier above one disk: what they share, and what each does for itself."""

from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

import pytest

from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import CPU, DISK, GPU
from kvsim.engine.prefetching import Prefetching
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.server import CacheServer
from tests.core.small import SmallCache, make_tiers
from tests.workloads import random_requests

COUNTS = pytest.mark.parametrize("gpus", [2, 5])


def small_graph(
    gpus: int,
    *,
    gpu: int = 4,
    cpu: int = 40,
    disk: int = 80,
    eviction: Callable[[], Any] = LRU,
    placement: Callable[[], Any] = WriteThrough,
    disk_placement: Callable[[], Any] | None = None,
) -> SmallCache:
    """So many GPUs of one size above a CPU tier above a disk. The GPUs' names are gpu, gpu1, gpu2, ..."""
    shape: list[tuple[str, Sequence[int]]] = [("gpu", ())] * gpus
    shape += [("cpu", tuple(range(gpus))), ("disk", (gpus,))]
    placements = [placement() for _ in range(gpus)] + [(disk_placement or placement)()]
    capacities = [gpu] * gpus + [cpu, disk]
    tiers, edges = make_tiers(capacities, [eviction() for _ in capacities], placements, slots=True, page_tokens=1, shape=shape)
    return SmallCache(tiers, edges, Rules(recompute_last_token=False), 1)


@COUNTS
def test_what_one_gpu_has_written_down_every_other_hits(gpus: int) -> None:
    cache = small_graph(gpus)
    assert cache.use("abc", gpu=0) == (0, 0, 0)
    for other in range(1, gpus):
        assert cache.use("abcd", gpu=other) == (0, 3 if other == 1 else 4, 0)
    assert cache.use("abc", gpu=0) == (3, 0, 0)
    assert cache.counts.written_pages == 2 * 4, "each page once to the CPU tier and once to the disk"


@COUNTS
def test_what_only_the_disk_has_comes_to_any_gpu_through_the_cpu_tier(gpus: int) -> None:
    cache = small_graph(gpus, cpu=4)
    cache.use("abc", gpu=0)
    cache.use("wxyz", gpu=0)
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("wxyz", "wxyz", "abcwxyz")
    assert cache.use("abc", gpu=gpus - 1) == (0, 0, 3)
    assert cache.on("cpu") == "abcw" and cache.on(f"gpu{gpus - 1}") == "abc"
    if gpus > 2:
        assert cache.use("abc", gpu=1) == (0, 3, 0)


@COUNTS
def test_what_another_gpu_alone_has_is_no_hit(gpus: int) -> None:
    cache = small_graph(gpus, placement=WriteBack)
    cache.use("abc", gpu=0)
    for other in range(1, gpus):
        assert cache.use("abc", gpu=other) == (0, 0, 0)
    assert all(cache.on(tier.name) == "abc" for tier in cache.tiers[:gpus])
    assert cache.on("cpu") == ""


@COUNTS
def test_each_gpu_makes_room_for_itself(gpus: int) -> None:
    cache = small_graph(gpus)
    for at in range(gpus):
        cache.use("abcd", gpu=at)
    last = cache.tiers[gpus - 1]
    before = [tier.evicted_pages for tier in cache.tiers]
    cache.use("wxy", gpu=last.index)
    assert cache.on(last.name) == "awxy"
    assert all(cache.on(tier.name) == "abcd" for tier in cache.tiers[: gpus - 1])
    evicted = [tier.evicted_pages - earlier for tier, earlier in zip(cache.tiers, before, strict=True)]
    assert evicted == [0] * (gpus - 1) + [3, 0, 0]


@COUNTS
def test_a_page_in_use_on_one_gpu_may_leave_another(gpus: int) -> None:
    cache = small_graph(gpus, placement=WriteBack)
    cache.use("abcd", gpu=0)
    held = cache.run("abcd", gpu=gpus - 1)
    cache.use("wxyz", gpu=0)
    assert (cache.on("gpu"), cache.on(f"gpu{gpus - 1}")) == ("wxyz", "abcd")
    assert cache.fails("rst", pages=5) and not cache.fails("rst", pages=4)
    cache.release(held)


@COUNTS
def test_a_gpu_writes_down_what_it_evicts_even_if_another_gpu_has_it(gpus: int) -> None:
    """An engine knows nothing of what others have on their GPUs."""
    cache = small_graph(gpus, placement=WriteBack)
    for at in range(gpus):
        cache.use("abcd", gpu=at)
    cache.use("wxyz", gpu=0)
    assert cache.on("cpu") == "abcd" and cache.on("gpu") == "wxyz"
    assert cache.use("abcd", gpu=0) == (0, 4, 0)


def test_exclusive_pages_move_from_one_gpu_to_another_through_the_cpu_tier() -> None:
    cache = small_graph(2, placement=Exclusive)
    cache.use("abcd", gpu=0)
    cache.use("wxyz", gpu=0)
    assert (cache.on("gpu"), cache.on("gpu1"), cache.on("cpu")) == ("wxyz", "", "abcd")
    assert cache.use("abcd", gpu=1) == (0, 4, 0)
    assert (cache.on("gpu"), cache.on("gpu1"), cache.on("cpu")) == ("wxyz", "abcd", "")
    assert cache.use("abcd", gpu=0) == (0, 0, 0), "only the other GPU has them"
    assert (cache.on("gpu"), cache.on("gpu1"), cache.on("cpu")) == ("abcd", "abcd", "wxyz")


def test_what_a_gpu_computes_leaves_an_exclusive_cpu_tier() -> None:
    """The second GPU may not load, so it computes the pages that the CPU tier has."""
    cache = small_graph(2, placement=Exclusive)
    cache.use("abcd", gpu=0)
    cache.use("wxyz", gpu=0)
    assert cache.use("abcd", gpu=1, load=0) == (0, 0, 0)
    assert (cache.on("gpu1"), cache.on("cpu")) == ("abcd", "")


def test_exclusive_copies_stay_below_while_another_gpu_loads_them() -> None:
    cache = small_graph(2, placement=Exclusive)
    cache.use("abcd", gpu=0)
    cache.use("wxyz", gpu=0)
    one, other = cache.admitted("abcd", gpu=0), cache.admitted("abcd", gpu=1)
    cache.move(one.waits)
    cache.move(cache.load(one, next(cache.clock)).transfers)
    assert cache.on("cpu") == "abcdwxyz"
    cache.move(cache.load(other, next(cache.clock)).transfers)
    assert cache.on("cpu") == "wxyz"
    for lease in (one, other):
        cache.move(cache.insert(lease, next(cache.clock)))
        cache.move(cache.finish(lease))
    assert cache.on("gpu") == cache.on("gpu1") == "abcd"


@COUNTS
def test_a_reset_empties_every_gpu(gpus: int) -> None:
    cache = small_graph(gpus)
    held = [cache.run("abc", gpu=at) for at in range(gpus)]
    cache.reset()
    cache.check()
    for lease in held:
        cache.move(cache.finish(lease))
    assert all(tier.pool.free == tier.pool.capacity for tier in cache.tiers)
    assert cache.use("abc", gpu=gpus - 1) == (0, 0, 0)


def test_levels_say_what_a_hit_is_whatever_the_place_of_a_tier() -> None:
    cache = small_graph(3)
    assert [tier.level for tier in cache.tiers] == [GPU, GPU, GPU, CPU, DISK]
    assert [LEVELS[tier.level] for tier in cache.tiers[-2:]] == ["cpu", "disk"]


def seconds(gpus: int, requests: list[Request]) -> float:
    """CPU time of serving the requests from the last GPU."""
    shape: list[tuple[str, Sequence[int]]] = [("gpu", ())] * gpus
    shape += [("cpu", tuple(range(gpus))), ("disk", (gpus,))]
    capacities = [40] * gpus + [200, 1_000]
    placements = [WriteBack() for _ in range(gpus + 1)]
    tiers, edges = make_tiers(capacities, [LRU() for _ in capacities], placements, slots=False, page_tokens=1, shape=shape)
    cache = Cache(tiers, edges, Rules(), 1)
    cache.gpu = tiers[gpus - 1]
    server = CacheServer(cache, Prefetching(cache, NoPrefetch(), Offer))
    began = process_time()
    for request in requests:
        server.finish_request(server.serve(request, request.prompt_pages, request.arrival_s))  # type: ignore[arg-type]
    return process_time() - began


def test_gpus_that_stand_beside_cost_a_request_little() -> None:
    """1.2 to 1.4 times as much with 64 GPUs as with one."""
    requests = random_requests(1, requests=500, page_tokens=1, max_pages=30)
    one, many = (min(seconds(gpus, requests) for _ in range(3)) for gpus in (1, 64))
    assert many < 3 * one, f"{many / len(requests) * 1e6:.0f} us a request, {one / len(requests) * 1e6:.0f} us with one GPU"
