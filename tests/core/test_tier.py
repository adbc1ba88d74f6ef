"""A tier's sums, its edges, and which of its policy's hooks are called."""

import pytest

from kvsim.core.pool import Pool
from kvsim.core.tier import CPU, DISK, GPU, LEVELS, Edge, Tier, overrides
from kvsim.core.tree import Node
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import now, small_cache


class Listener(LRU):
    """Wants to know of hits."""

    def on_hit(self, node: Node, now: float) -> None:
        """Do nothing with it."""


class Heir(Listener):
    """Has the hook from the class that it derives from."""


def tier_of(eviction: LRU, name: str = "gpu", index: int = GPU, pages: int | None = 8) -> Tier:
    return Tier(name, index, Pool(pages), eviction)


@pytest.mark.parametrize(("policy", "is_heard"), [(LRU(), False), (Listener(), True), (Heir(), True)])
def test_hooks_of_a_policy_are_called_only_if_it_has_them(policy: LRU, is_heard: bool) -> None:
    assert overrides(policy, "on_hit") == tier_of(policy).wants_hits == is_heard
    assert not tier_of(policy).wants_arrivals


def test_a_tier_is_what_its_place_says_unless_another_level_is_given() -> None:
    assert [tier_of(LRU(), index=index).level for index in (GPU, CPU, DISK)] == [GPU, CPU, DISK]
    assert Tier("disk", 1, Pool(8), LRU(), DISK).level == DISK
    assert [LEVELS[level] for level in (GPU, CPU, DISK)] == ["gpu", "cpu", "disk"]


def test_an_edge_is_found_by_the_tier_below() -> None:
    gpu, cpu, disk = (tier_of(LRU(), name, index) for index, name in enumerate(LEVELS))
    edge = Edge(gpu, cpu, WriteBack())
    assert gpu.edge_to(cpu) is edge
    assert (gpu.below, cpu.above, cpu.below) == ([edge], [edge], [])
    with pytest.raises(AssertionError, match="no edge joins gpu and disk"):
        gpu.edge_to(disk)


def test_room_is_what_is_free_what_is_leaving_and_what_can_leave() -> None:
    """Of 8 pages, ab can leave and cd is in use. uvwxyz is promised the 4 free slots and, once ab is written down, its 2."""
    cache = small_cache(gpu=8, cpu=8, placement=WriteBack)
    cache.use("ab")
    held = cache.run("cd")
    gpu = cache.gpu
    assert (gpu.pool.free, gpu.spare_pages, gpu.available_pages, gpu.held_pages) == (4, 4, 6, 4)
    lease = cache.look("uvwxyz")
    assert cache.admit(lease, 6, now(cache))
    assert (gpu.leaving_pages, gpu.promised_pages, gpu.evictable_pages) == (2, 6, 0)
    assert (gpu.spare_pages, gpu.available_pages) == (0, 0)
    cache.move(lease.waits)
    assert (gpu.leaving_pages, gpu.promised_pages, gpu.pool.free, gpu.held_pages) == (0, 6, 6, 2)
    cache.release(lease)
    cache.release(held)
    cache.check()


def test_pages_that_are_there_were_inserted_and_not_evicted() -> None:
    cache = small_cache(gpu=4)
    cache.use("abc")
    cache.use("xyz")
    assert (cache.gpu.inserted_pages, cache.gpu.evicted_pages, cache.gpu.held_pages) == (6, 2, 4)
