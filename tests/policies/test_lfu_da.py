"""LFU with dynamic aging."""

from kvsim.policies.eviction.lfu_da import LFUDynamicAging
from tests.core.small import SmallCache, offered, small_cache


def played(policy: type, words: str, gpu: int = 3) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=policy)
    for word in words:
        cache.use(word)
    return cache


def test_the_level_is_that_of_the_last_victim() -> None:
    """a has H = 3. d and e push out b and c (H = 1): L = 1, theirs are 2. f and g push out d and e: L = 2, theirs are 3."""
    levels = []
    cache = played(LFUDynamicAging, "aaabc")
    for word in "defgh":
        cache.use(word)
        levels.append(cache.gpu.eviction.level)
    assert levels == [1, 1, 2, 2, 3]


def test_looking_at_victims_raises_no_level() -> None:
    cache = played(LFUDynamicAging, "aaab")
    assert len(offered(cache.gpu.eviction, 99.0)) == 2
    assert offered(cache.gpu.eviction, 99.0)[0].hits == 1
    assert cache.gpu.eviction.level == 0
