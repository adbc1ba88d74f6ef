"""A fourth tier, below the disk or beside it: what it has is read into the CPU tier, whatever stands between on the way down."""

from collections.abc import Sequence

import pytest

from kvsim.core.rules import Rules
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import SmallCache, make_tiers, now

Shape = list[tuple[str, Sequence[int]]]
BELOW: Shape = [("gpu", ()), ("cpu", (0,)), ("disk", (1,)), ("remote", (1, 2))]
BESIDE: Shape = [("gpu", ()), ("cpu", (0,)), ("disk", (1,)), ("remote", (1,))]


class ReadsOnly(PlacementPolicy):
    """Copies nothing down: pages are only read over the edge."""

    def after_eviction(self, node: object, now: float) -> bool:
        return False


def four_tiers(shape: Shape, placements: Sequence[PlacementPolicy], *, gpu: int = 2, cpu: int = 2, disk: int = 2) -> SmallCache:
    tiers, edges = make_tiers([gpu, cpu, disk, 40], [LRU() for _ in shape], placements, slots=True, page_tokens=1, shape=shape)
    return SmallCache(tiers, edges, Rules(recompute_last_token=False), 1)


def sunk() -> SmallCache:
    """Pages sink tier by tier: ``ab`` has got to the fourth, ``gh`` is on the GPU."""
    cache = four_tiers(BELOW, [WriteBack(), WriteBack(), ReadsOnly(), WriteBack()])
    for word in ("ab", "cd", "ef", "gh"):
        cache.use(word)
    assert [cache.on(tier.name) for tier in cache.tiers] == ["gh", "ef", "cd", "ab"]
    return cache


def test_pages_of_the_fourth_tier_pass_the_disk_by_on_their_way_up() -> None:
    cache = sunk()
    lease = cache.admitted("ab")
    assert lease.below == [0, 0, 0, 2] and lease.far_pages == 2
    *_, read, load = cache.load(lease, now(cache)).transfers
    assert (read.name, load.name) == ("remote-cpu", "cpu-gpu")
    cache.move([read, load])
    assert cache.on("gpu") == "ab" and lease.reused_pages(4) == [0, 0, 0, 2]
    cache.check()


def test_a_prefetch_reads_from_one_tier_at_a_time() -> None:
    """The CPU tier has ``a`` and room for two pages more."""
    cache = four_tiers(BELOW, [WriteBack(), WriteBack(), ReadsOnly(), WriteBack()], gpu=4, cpu=3, disk=1)
    for word in ("abcd", "w", "x", "y", "z", "v", "u"):
        cache.use(word)
    assert [cache.on(tier.name) for tier in cache.tiers[1:]] == ["awx", "b", "cd"]
    lease = cache.look("abcd")
    assert (lease.below, lease.leading_pages) == ([0, 1, 1, 2], 1)
    *write_downs, fetch = cache.fetch(lease, 3, now(cache)).transfers
    assert (fetch.name, cache.carried(fetch)) == ("disk-cpu", "b")
    cache.move([*write_downs, fetch])
    fetch = cache.fetch(cache.look("abcd"), 3, now(cache)).transfers[-1]
    assert (fetch.name, cache.carried(fetch)) == ("remote-cpu", "c")
    cache.check()


@pytest.mark.parametrize("shape", [BELOW, BESIDE])
def test_every_tier_gets_a_copy_of_what_is_written_through(shape: Shape) -> None:
    edges = sum(len(above) for _, above in shape)
    cache = four_tiers(shape, [WriteThrough() for _ in range(edges)], gpu=4, cpu=8, disk=8)
    cache.use("abc")
    assert {cache.on(tier.name) for tier in cache.tiers} == {"abc"}
    cache.check()
