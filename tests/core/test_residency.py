"""Copies, pins, slots and their sums: each change of one fact keeps all that depends on it right."""

from kvsim.core.tree import READY
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import small_cache

# --- counting --------------------------------------------------------------------------------------------------------


def test_pages_in_and_out_of_a_tier_differ_by_what_it_holds() -> None:
    cache = small_cache(gpu=3, cpu=4, disk=6, placement=WriteBack)
    for word in ("abc", "xyz", "abd", "pq", "abc", "xyz"):
        cache.use(word)
        for tier in cache.tiers:
            assert tier.inserted_pages - tier.evicted_pages == len(cache.on(tier.name))


def test_no_two_uses_of_the_cache_have_the_same_time() -> None:
    cache = small_cache(gpu=8, eviction=LRU)
    for word in ("a", "b", "c"):
        lease = cache.look(word)
        assert cache.admit(lease, 1, 5.0)
        cache.insert(lease, 5.0)
        cache.release(lease)
    used = [cache.node(word).last_used for word in "abc"]
    assert used == sorted(set(used)) and used[0] > 5.0 - 1e-9
    assert all(node.state == [READY] for node in cache.tree.root.descendants())
