"""Copies, pins, slots and their sums: each change of one fact keeps all that depends on it right."""

from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.residency import just_after
from kvsim.core.tier import Tier
from kvsim.core.tree import WIDE, Node, RadixTree
from tests.core.small import SmallCache, now, only, small_cache


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


@given(st.floats(allow_nan=False) | st.floats(0, 1e9) | st.integers(-1000, 1000).map(lambda power: 2.0**power))
def test_no_time_lies_between_one_and_the_next(now: float) -> None:
    below = nextafter(now, -inf)
    assert just_after(now) == nextafter(now, inf) and just_after(below) == nextafter(below, inf)


def test_what_is_announced_anew_is_recent_without_a_hit() -> None:
    cache = small_cache(gpu=2)
    cache.use("a")
    cache.use("b")
    hits = cache.node("a").hits
    cache.residency.reannounce([cache.node("a")], now(cache))
    assert cache.node("a").hits == hits
    assert cache.leaving_order() == "ba"


def cache_that_makes_room_on_disk_when_pages_leave() -> SmallCache:
    """``a`` is on disk only and ``b``, below it, in CPU memory only. Whenever pages leave CPU memory, the disk makes room for two
    pages, as it does for the recurrent state after them where states share tiers with pages."""
    cache = small_cache(gpu=2, cpu=2, disk=2)
    cache.use("a")
    cache.use("ab")
    above, below = cache.node("a"), cache.node("ab")
    gpu, cpu, disk = cache.tiers
    for node, tier in ((below, gpu), (above, gpu), (above, cpu), (below, disk)):
        cache.residency.free(node, tier)
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("", "b", "a")

    def make_room(node: Node, tier: Tier) -> None:
        if tier is cpu:
            assert cache.transfers.eviction.make_room(disk, 2, now(cache))

    cache.residency.on_leave = make_room
    return cache


def test_a_node_that_pages_below_it_push_out_is_not_evicted_twice() -> None:
    cache = cache_that_makes_room_on_disk_when_pages_leave()
    cache.transfers.eviction.evict(cache.node("a"), cache.tiers[2], now(cache))
    cache.check()
    assert [tier.pool.free for tier in cache.tiers] == [2, 2, 2] and cache.counts.dropped_pages == 2


def test_an_unreadable_copy_that_pages_below_it_push_out_is_not_freed_twice() -> None:
    cache = cache_that_makes_room_on_disk_when_pages_leave()
    fetch = only(cache.fetch(cache.look("a"), 1, now(cache)).transfers)
    assert cache.begin(fetch, now(cache)).can_run
    fetch.has_fault = True
    cache.abort(fetch, 0, now(cache))
    cache.check()
    assert [tier.pool.free for tier in cache.tiers] == [2, 2, 2] and cache.counts.unreadable_pages == 1


@pytest.mark.parametrize("tiers", [1, 3, WIDE, 64])
@given(st.data())
def test_a_list_that_nodes_share_is_never_written_to(tiers: int, data: st.DataObject) -> None:
    """Two requests at a time pin, add, cut and merge nodes of a tree with few or many tiers; ``check`` recounts all."""
    cache = small_cache(gpu=12)
    cache.residency.tree = RadixTree(tiers)
    running = []
    for _ in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(st.text("ab", min_size=1, max_size=6))
        if running and data.draw(st.booleans()):
            cache.finish(running.pop(data.draw(st.integers(0, len(running) - 1))))
        elif len(running) < 2:
            running.append(cache.run(prompt))
        cache.check()
        assert cache.residency.tree.zeros == [0] * tiers
    for lease in running:
        cache.finish(lease)
    cache.check()
    for node in cache.residency.tree.root.descendants():
        assert node.pins is node.tree.zeros if tiers >= WIDE else not any(node.pins)


def test_a_cut_node_that_nothing_pins_shares_its_pins_with_all_others() -> None:
    cache = small_cache(gpu=8)
    cache.residency.tree = RadixTree(WIDE)
    cache.use("abcd")
    lower = cache.node("abcd")
    upper = cache.residency.cut(lower, 2)
    assert upper.pins is lower.pins is lower.children_in is lower.tree.zeros
    assert upper.children_in == [1] + [0] * (WIDE - 1)
    cache.residency.pin(lower, cache.gpu)
    assert upper.pins == lower.pins == [1] + [0] * (WIDE - 1)
    assert upper.pins is not lower.pins
    cache.residency.unpin(lower, cache.gpu)
    assert upper.pins is lower.pins is lower.tree.zeros
    cache.check()
