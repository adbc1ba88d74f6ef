"""LFU with dynamic aging."""

from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lfu_da import LFUDynamicAging
from tests.core.small import SmallCache, offered, small_cache


def played(policy: type, words: str, gpu: int = 3) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=policy)
    for word in words:
        cache.use(word)
    return cache


def test_without_evictions_it_is_lfu() -> None:
    for words in ("aaabbc", "baab", "cabcab"):
        assert played(LFUDynamicAging, words, 6).leaving_order() == played(LFU, words, 6).leaving_order()


def test_the_level_is_that_of_the_last_victim() -> None:
    """a has H = 3. d and e push out b and c (H = 1): L = 1, theirs are 2. f and g push out d and e: L = 2, theirs are 3."""
    levels = []
    cache = played(LFUDynamicAging, "aaabc")
    for word in "defgh":
        cache.use(word)
        levels.append(cache.gpu.eviction.level)
    assert levels == [1, 1, 2, 2, 3]


def test_what_was_popular_once_leaves_at_last() -> None:
    assert played(LFUDynamicAging, "aaabcdefgh").on("gpu") == "fgh"
    assert "a" in played(LFU, "aaabcdefgh").on("gpu")


def test_a_hit_counts_from_the_level_of_its_time() -> None:
    """After d and e, L is 1 and d has H = 2; used again it has 1 + 2 = 3, and is younger than a with 3."""
    assert played(LFUDynamicAging, "aaabcded").leaving_order() == "ead"


def test_looking_at_victims_raises_no_level() -> None:
    cache = played(LFUDynamicAging, "aaab")
    assert len(offered(cache.gpu.eviction, 99.0)) == 2
    assert offered(cache.gpu.eviction, 99.0)[0].hits == 1
    assert cache.gpu.eviction.level == 0


def test_a_part_of_a_node_that_leaves_is_a_victim_too() -> None:
    cache = small_cache(gpu=4, eviction=LFUDynamicAging)
    cache.use("abc")
    cache.use("xy")
    assert (cache.on("gpu"), cache.gpu.eviction.level) == ("abxy", 1)
