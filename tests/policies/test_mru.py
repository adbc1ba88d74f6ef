"""Most recently used."""

from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.mru import MRU
from tests.core.small import small_cache


def test_it_keeps_part_of_a_cycle_that_does_not_fit() -> None:
    hits = {}
    for policy in (LRU, MRU):
        cache = small_cache(gpu=3, eviction=policy)
        hits[policy] = sum(cache.use(word)[0] for word in "abcd" * 5)
    assert hits == {LRU: 0, MRU: 11}, "after abcd, two of three hit"
