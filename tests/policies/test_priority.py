"""Eviction by the priority of requests."""

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.priority import Priority
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request


def filled(*uses: tuple[str, int], **sizes: int) -> SmallCache:
    cache = small_cache(**{"gpu": 12, **sizes}, eviction=Priority)
    for word, priority in uses:
        cache.use(word, priority=priority)
    return cache


def test_low_priorities_leave_first_then_the_least_recently_used() -> None:
    assert filled(("a", 1), ("b", 0), ("c", 1), ("d", -1)).leaving_order() == "dbac"


def test_a_copy_below_learns_the_priority_of_a_request_that_runs() -> None:
    cache = filled(("a", 1), gpu=3, cpu=6)
    lease = cache.run("b", priority=-1)
    order = [node.notes[1] for node in offered(cache.tiers[1].eviction, 99.0)]
    assert order == [1, None]
    cache.finish(lease)
    assert [node.notes[1] for node in offered(cache.tiers[1].eviction, 99.0)] == [-1, 1]


def test_a_trace_without_priorities_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the priority of each request, which this trace does not have"):
        Priority().bind(PolicyContext(requests=[make_request([0])]))
