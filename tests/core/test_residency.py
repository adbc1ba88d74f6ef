"""Copies, pins, slots and their sums: each change of one fact keeps all that depends on it right."""

import pytest

from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import SmallCache, now, only, small_cache

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


# --- the tree --------------------------------------------------------------------------------------------------------


def test_following_a_path_cuts_the_node_in_which_it_ends() -> None:
    cache = small_cache(gpu=8)
    cache.use("abcd")
    path, rest = cache.residency.follow(cache.tree.root, cache.request("abxy").runs)
    assert [node.pages for node in path] == [2] and rest == cache.request("abxy").runs[1:]
    assert cache.residency.follow(cache.tree.root, cache.request("abcd").runs, limit=1) == ([cache.node("a")], ((1, 3),))
    cache.check()


def test_a_cut_gives_each_part_its_slots_pins_and_transfers() -> None:
    cache = small_cache(gpu=8, cpu=8)
    write_down = only(cache.insert(cache.admitted("abcd"), now(cache)))
    cache.begin(write_down, now(cache))
    lower, slots = cache.node("abcd"), [cache.node("abcd").slots[tier].tolist() for tier in (0, 1)]
    upper = cache.residency.cut(lower, 1)
    assert [upper.slots[tier].tolist() + lower.slots[tier].tolist() for tier in (0, 1)] == slots
    assert [part.pages for part in write_down.nodes] == [1, 3] and write_down.nodes == [upper, lower]
    assert upper.state == lower.state == [READY, INCOMING]
    assert upper.transfers == lower.transfers == (write_down,)
    cache.check()


def test_the_first_pages_of_nodes_end_in_a_cut() -> None:
    cache = small_cache(gpu=8)
    cache.use("ab")
    cache.use("cdef")
    nodes = [cache.node("ab"), cache.node("cdef")]
    assert cache.residency.first_pages(nodes, 2) == nodes[:1]
    assert [node.pages for node in cache.residency.first_pages(nodes, 3)] == [2, 1]
    assert cache.residency.first_pages(nodes, 0) == []


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


# --- pins ------------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_a_node_and_all_above_it() -> None:
    cache = small_cache(gpu=8)
    cache.use("abc")
    cache.use("abd")
    assert cache.gpu.evictable_pages == 4
    node = cache.node("abc")
    for pins, evictable in ((1, 1), (2, 1)):
        cache.residency.pin(node, cache.gpu)
        assert (node.pins[0], cache.node("ab").pins[0], cache.gpu.evictable_pages) == (pins, pins, evictable)
    cache.residency.unpin(node, cache.gpu)
    assert cache.gpu.evictable_pages == 1
    cache.residency.unpin(node, cache.gpu)
    assert cache.gpu.evictable_pages == 4
    cache.check()


def test_a_whole_path_is_pinned_at_once() -> None:
    cache = small_cache(gpu=8)
    cache.use("abc")
    cache.use("abd")
    path = [cache.node("ab"), cache.node("abd")]
    cache.residency.pin_path(path, cache.gpu, 3)
    assert cache.gpu.evictable_pages == 1
    cache.residency.pin_path(path[:1], cache.gpu, 2)
    assert (cache.gpu.evictable_pages, path[0].pins, path[1].pins) == (1, [2], [1])


# --- copies ----------------------------------------------------------------------------------------------------------


def states(node: Node) -> list[int]:
    return list(node.state)


def test_a_copy_is_promised_filled_used_and_freed() -> None:
    """A copy of ab in the CPU tier, step by step."""
    cache = small_cache(gpu=4, cpu=4, placement=WriteBack)
    cache.use("ab")
    node, cpu, residency = cache.node("ab"), cache.tiers[1], cache.residency
    residency.promise_copy(node, cpu)
    assert (states(node), cpu.promised_pages, cpu.pool.free) == ([READY, INCOMING], 2, 4)
    node.slots[1] = cpu.pool.take(2)
    cpu.promised_pages -= 2
    residency.set_ready(node, cpu, now(cache))
    assert (states(node), cpu.inserted_pages, cpu.evictable_pages) == ([READY, READY], 2, 2)
    cache.check()
    residency.free(node, cpu)
    assert (states(node), cpu.evicted_pages, cpu.pool.free, cpu.held_pages) == ([READY, ABSENT], 2, 4, 0)
    cache.check()


def test_a_leaving_copy_may_stay_after_all() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=WriteBack)
    cache.use("ab")
    node, gpu, before = cache.node("ab"), cache.gpu, cache.gpu.inserted_pages
    cache.residency.leave(node, gpu)
    assert (states(node), gpu.leaving_pages, gpu.evictable_pages, gpu.held_pages) == ([LEAVING, ABSENT], 2, 0, 2)
    cache.residency.stay(node, gpu, now(cache))
    assert (states(node), gpu.leaving_pages, gpu.evictable_pages) == ([READY, ABSENT], 0, 2)
    assert gpu.inserted_pages == before, "it was never evicted"
    cache.check()


def test_the_last_copy_takes_the_node_out_of_the_tree() -> None:
    cache = small_cache(gpu=4, cpu=4)
    cache.use("ab")
    node = cache.node("ab")
    cache.residency.free(node, cache.gpu)
    assert list(cache.tree.root.descendants()) == [node]
    cache.residency.free(node, cache.tiers[1])
    assert list(cache.tree.root.descendants()) == []
    cache.check()


def test_the_end_of_a_victim_is_trimmed() -> None:
    cache = small_cache(gpu=4)
    cache.use("abcd")
    cache.residency.trim(cache.node("abcd"), cache.gpu, 3)
    assert (cache.on("gpu"), cache.gpu.pool.free, cache.gpu.evicted_pages, cache.counts.dropped_pages) == ("a", 3, 3, 3)
    cache.check()


def test_who_wants_to_know_is_told_of_pages_that_leave() -> None:
    cache = small_cache(gpu=4, cpu=4)
    cache.use("abc")
    cache.use("abd")
    told: list[tuple[str, str]] = []
    cache.residency.on_leave = lambda node, tier: told.append((cache.words.text(node.runs), tier.name))
    cache.residency.free(cache.node("abd"), cache.gpu)
    cache.residency.drop_descendants(cache.node("ab"))
    assert told[0] == ("d", "gpu") and sorted(told[1:]) == [("c", "cpu"), ("c", "gpu"), ("d", "cpu")]


# --- giving up -------------------------------------------------------------------------------------------------------


def used_and_unused() -> SmallCache:
    """A request uses ``ab``; no request uses ``xy``."""
    cache = small_cache(gpu=8)
    cache.use("xy")
    cache.run("ab")
    return cache


def test_what_is_in_use_is_doomed_and_freed_at_its_last_unpin() -> None:
    cache = used_and_unused()
    node = cache.node("ab")
    cache.residency.clear()
    assert list(cache.tree.root.descendants()) == []
    assert cache.residency.doomed == {node} and node.state == [DOOMED] and cache.residency.is_doomed(node)
    assert cache.gpu.pool.free == 6
    cache.residency.unpin(node, cache.gpu)
    assert not cache.residency.doomed and cache.gpu.pool.free == 8 and cache.gpu.held_pages == 0


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
