"""Most recently used."""

from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.mru import MRU
from tests.core.small import offered, small_cache


def test_what_was_used_last_leaves_first() -> None:
    cache = small_cache(gpu=4, eviction=MRU)
    for word in "abca":
        cache.use(word)
    assert cache.leaving_order() == "acb"


def test_it_keeps_part_of_a_cycle_that_does_not_fit() -> None:
    hits = {}
    for policy in (LRU, MRU):
        cache = small_cache(gpu=3, eviction=policy)
        hits[policy] = sum(cache.use(word)[0] for word in "abcd" * 5)
    assert hits == {LRU: 0, MRU: 11}, "after abcd, two of three hit"


def test_a_use_takes_effect_at_once_in_a_lower_tier() -> None:
    cache = small_cache(gpu=2, cpu=3, eviction=[LRU, MRU])
    for word in "abca":
        cache.use(word)
    assert [cache.tree.root.children[0]] == [offered(cache.tiers[1].eviction, 99.0)[0]]
