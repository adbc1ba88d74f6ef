"""Hits per token by hand."""

from random import Random

import pytest

from kvsim.policies.eviction.hpt import HitsPerToken
from tests.core.small import SmallCache, offered
from tests.policies.small import filled
from tests.workloads import make_request, random_word


def test_the_fewest_hits_for_its_length_leave_first() -> None:
    """abcd: 1 / 4; xy, used twice: 2 / 2; z, used last: 1 / 1, and w before it."""
    cache = filled(HitsPerToken(), "w", "xy", "xy", "abcd", "z")
    assert [node.pages for node in offered(cache.gpu.eviction, 99.0)] == [4, 1, 2, 1]
    assert cache.leaving_order()[0] == "d"


def test_equals_leave_least_recently_used_first() -> None:
    cache = filled(HitsPerToken(), "ab", "cd", "ef", "cd", "ab")
    assert [cache.words.text(node.runs) for node in offered(cache.gpu.eviction, 99.0)] == ["ef", "cd", "ab"]


def test_what_is_left_of_a_victim_ranks_by_its_own_length() -> None:
    """abcd: 1 / 4, then abc: 1 / 3, then ab: 1 / 2 like xy, which was used later."""
    assert filled(HitsPerToken(), "abcd", "xy").leaving_order() == "dcbyax"


@pytest.mark.parametrize("seed", range(5))
def test_as_many_pages_leave_at_once_as_one_by_one(seed: int) -> None:
    random = Random(seed)
    words = [random_word(random, "abcd", longest=9) for _ in range(25)]
    stepwise = filled(HitsPerToken(), *words, gpu=40)
    held = len(stepwise.on("gpu"))
    for pages in range(1, held + 1):
        make_room(stepwise, 1)
        at_once = filled(HitsPerToken(), *words, gpu=40)
        make_room(at_once, pages)
        assert stepwise.on("gpu") == at_once.on("gpu") and len(at_once.on("gpu")) == held - pages


def make_room(cache: SmallCache, pages: int) -> None:
    """Evict so many pages."""
    lease = cache.match(make_request([-1]))
    assert cache.admit(lease, cache.gpu.pool.free + pages, next(cache.clock))
    cache.move(lease.waits)
    cache.release(lease)


def test_a_cut_shortens_and_a_merge_lengthens() -> None:
    """abx parts abcd after ab. When x has left, abcd is whole again, but ab has a hit more than cd: they stay apart."""
    cache = filled(HitsPerToken(), "abcd", "abx", "yz")
    policy = cache.gpu.eviction
    assert policy.rank(cache.node("abcd")) == 1 / 2 and policy.rank(cache.node("ab")) == 2 / 2
    looked = filled(HitsPerToken(), "abcd", "yz")
    whole = looked.node("abcd")
    looked.residency.cut(whole, 2)
    assert offered(looked.gpu.eviction, 99.0)[0] is whole
    looked.residency.merge(whole.parent)
    assert whole.pages == 4 and looked.gpu.eviction.rank(whole) == 1 / 4
    assert offered(looked.gpu.eviction, 99.0) == [whole, looked.node("yz")]
    assert looked.leaving_order()[0] == "d"
