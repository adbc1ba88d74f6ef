"""Copies, pins, slots and their sums: each change of one fact keeps all that depends on it right."""

import pytest

from tests.core.small import SmallCache, now, small_cache


@pytest.mark.parametrize("difference", ["none", "hits", "pins", "a copy", "a second child"])
def test_parts_are_joined_again_only_if_nothing_tells_them_apart(difference: str) -> None:
    cache = small_cache(gpu=8, cpu=8)
    cache.use("abcd")
    lower = cache.node("abcd")
    upper = cache.residency.cut(lower, 2)
    if difference == "hits":
        lower.hits += 1
    elif difference == "pins":
        cache.residency.pin(upper, cache.gpu)
    elif difference == "a copy":
        cache.residency.free(lower, cache.gpu)
    elif difference == "a second child":
        cache.use("abx")
    cache.residency.merge(upper)
    assert (lower.pages == 4) == (difference == "none")


def used_and_unused() -> SmallCache:
    """A request uses ``ab``; no request uses ``xy``."""
    cache = small_cache(gpu=8)
    cache.use("xy")
    cache.run("ab")
    return cache


def test_no_moment_is_used_twice() -> None:
    residency = used_and_unused().residency
    first, second, third = residency.tick(100.0), residency.tick(100.0), residency.tick(50.0)
    assert 100.0 == first < second < third < 100.0 + 1e-9
    assert residency.tick(200.0) == 200.0


def test_what_is_announced_anew_is_recent_without_a_hit() -> None:
    cache = small_cache(gpu=2)
    cache.use("a")
    cache.use("b")
    hits = cache.node("a").hits
    cache.residency.reannounce([cache.node("a")], now(cache))
    assert cache.node("a").hits == hits
    assert cache.leaving_order() == "ba"
