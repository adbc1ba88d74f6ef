"""LRU-K."""

import pytest

from kvsim.policies.eviction.lru_k import LRUK
from tests.core.small import small_cache


def order(words: str, k: int) -> str:
    cache = small_cache(gpu=12, eviction=lambda: LRUK(k=k))
    for word in words:
        cache.use(word)
    return cache.leaving_order()


def test_the_second_last_use_counts() -> None:
    """The second last use of a is the first of all, that of b the second; the last use of a is later than that of b."""
    assert order("abba", k=2) == "ab"


def test_what_has_left_is_forgotten() -> None:
    """a comes back after it had left: its two old uses do not count."""
    cache = small_cache(gpu=2, eviction=lambda: LRUK(k=2))
    for word in "aabbcca":
        cache.use(word)
    assert cache.node("a").notes[0] == (cache.node("a").created,)


def test_k_is_at_least_1() -> None:
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        LRUK(k=0)
