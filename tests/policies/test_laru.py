"""LARU: predictions, mistakes and phases by hand, and its victims against comparing all candidates."""

from math import ceil, inf
from random import Random

import pytest

from kvsim.core.tree import Node
from kvsim.policies.eviction.laru import LearningAugmented, Use
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import random_word


def filled(*words: str, gpu: int = 40) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=LearningAugmented)
    for index, word in enumerate(words):
        cache.use(word, index=index)
    return cache


def used(cache: SmallCache, word: str) -> Use:
    """What is noted with the node that a word ends with."""
    return cache.node(word).notes[0]


# --- predictions -----------------------------------------------------------------------------------------------------


def test_a_mean_time_between_uses_weighs_the_latest_one_as_much_as_all_before() -> None:
    cache = filled("a")
    assert used(cache, "a").gap_s == 0
    times = [used(cache, "a").at_s]
    for index, others in enumerate(("", "xyz", "x"), 1):
        for word in others:
            cache.use(word)
        cache.use("a", index=10 * index)
        times.append(used(cache, "a").at_s)
    first, second, third = (times[number + 1] - times[number] for number in range(3))
    assert second > third > first
    assert used(cache, "a").gap_s == pytest.approx(((first + second) / 2 + third) / 2)


def test_seconds_until_the_next_use() -> None:
    """After one use: the mean of all pages / the share used again, (3 + 1) / (10 + 2). Overdue: as far as it is past."""
    cache = filled("a", "b")
    policy, node = cache.gpu.eviction, cache.node("a")
    node.notes[0] = Use(0, 10.0, 100.0)
    assert policy.score(node, 104.0) == pytest.approx(-6)
    assert policy.score(node, 125.0) == pytest.approx(-25)
    node.notes[0] = Use(0, 0.0, 100.0)
    policy._gap_s, policy._seen, policy._again = 6.0, 10, 3
    assert policy.score(node, 104.0) == pytest.approx(-(6 / (4 / 12) - 4))
    node.notes[0] = None
    assert policy.score(node, 104.0) == inf


def test_what_comes_back_at_regular_times_stays() -> None:
    """a returns every other request, x, y and z never."""
    cache = filled("a", "x", "a", "y", "a", "z")
    assert cache.leaving_order() == "zyxa", "LRU's is xyaz"


# --- mistakes and phases ---------------------------------------------------------------------------------------------


def test_after_a_mistake_the_least_recently_used_page_leaves_and_then_fewer_are_compared() -> None:
    """Four pages, of which d begins a phase. It leaves for e, the latest one for a new one, and comes back: a mistake."""
    cache = filled("a", "z", "a", "b", "c", "d", gpu=4)
    policy = cache.gpu.eviction
    assert (cache.on("gpu"), policy.phase) == ("azbd", 1)
    cache.use("e", index=6)
    assert (cache.on("gpu"), policy.share) == ("azbe", 1.0)
    cache.use("d", index=7)
    assert (cache.on("gpu"), policy.share) == ("azbd", 0.5)
    cache.use("f", index=8)
    assert cache.on("gpu") == "abdf", "LRU's victim is z"
    cache.use("z", index=9)
    assert (cache.on("gpu"), policy.share) == ("zbdf", 0.5), "a is overdue; and z had not left by prediction"
    cache.use("z", index=10)
    cache.use("y", index=11)
    assert (policy.phase, policy.share) == (2, 1.0), "d, e, f and z were the fourth of the phase"


def test_a_phase_ends_when_more_pages_have_been_used_than_there_is_room_for() -> None:
    cache = filled("abc", "abd", gpu=6)
    policy = cache.gpu.eviction
    assert (policy.phase, policy._used_pages) == (0, 4)
    cache.use("xy", index=3)
    assert (policy.phase, policy._used_pages) == (0, 6)
    policy.share = 0.25
    cache.use("ab", index=4)
    assert (policy.phase, policy.share) == (0, 0.25), "nothing new"
    cache.use("abz", index=5)
    assert (policy.phase, policy._used_pages, policy.share) == (1, 3, 1.0), "z is the seventh"


# --- victims ---------------------------------------------------------------------------------------------------------


def slow_seconds(policy: LearningAugmented, node: Node, now: float) -> float:
    """Seconds until the next use, from the formula alone."""
    if node.notes[0] is None:
        return -inf
    gap_s, last_s = node.notes[0].gap_s, node.notes[0].at_s
    if not gap_s:
        gap_s = policy._gap_s / ((policy._again + 1) / (policy._seen + 2))
    return gap_s - (now - last_s) if now - last_s <= gap_s else now - last_s


@pytest.mark.parametrize("seed", range(5))
def test_the_victim_is_the_farthest_of_the_candidates_and_pages_of_a_phase_are_counted_once(seed: int) -> None:
    random = Random(seed)
    cache = small_cache(gpu=24, eviction=LearningAugmented)
    policy, narrow, phase, distinct = cache.gpu.eviction, 0, 0, set()
    for index in range(300):
        word = random_word(random, "abcd", longest=6)
        cache.use(word, index=index)
        pages = set(cache.words.pages(word))
        distinct = pages if policy.phase != phase else distinct | pages
        phase = policy.phase
        assert policy._used_pages == len(distinct) <= 24
        now = float(next(cache.clock))
        leaves = [node for node in cache.tree.root.descendants() if node.is_evictable(0)]
        policy._line = [entry for entry in policy._line if policy._is_current(entry)]
        by_use = policy._by_use
        assert {entry.node for entry in policy._line} == set(leaves)
        count = 1 if by_use else ceil(policy.share * len(policy._line))
        candidates = [entry.node for entry in policy._line[:count]]
        narrow += 1 < count < len(leaves)
        victim = offered(policy, now)[0]
        assert victim in candidates
        assert slow_seconds(policy, victim, now) == pytest.approx(max(slow_seconds(policy, leaf, now) for leaf in candidates))
        policy._by_use = by_use
    assert narrow > 10 and phase > 3


def test_of_many_candidates_some_are_drawn() -> None:
    words = [first + second for first in "abcdefgh" for second in "ijklmnop"]
    cache = small_cache(gpu=200, eviction=lambda: LearningAugmented(samples=4))
    for index, word in enumerate(words):
        cache.use(word, index=index)
    order = offered(cache.gpu.eviction, 1e6)
    assert len(order) == len(set(order)) >= 64


def test_old_entries_are_forgotten() -> None:
    cache = filled(*("abc"[number % 3] for number in range(2000)), gpu=3)
    assert len(cache.gpu.eviction._line) <= 65
