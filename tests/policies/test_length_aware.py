"""Length-aware eviction."""

from kvsim.policies.eviction.length_aware import LengthAware
from tests.core.small import SmallCache, small_cache


def filled(*words: str) -> SmallCache:
    cache = small_cache(gpu=12, eviction=LengthAware)
    for word in words:
        cache.use(word)
    return cache


def test_the_end_of_the_longest_prompt_leaves_first() -> None:
    """d and c are alone at positions 4 and 3; of b and y, and of a and x, the first was used longer ago."""
    assert filled("abcd", "xy").leaving_order() == "dcbyax"
    assert filled("xy", "abcd").leaving_order() == "dcybxa"
