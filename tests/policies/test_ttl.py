"""Time to live per session."""

from itertools import count

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.ttl import TimeToLive
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request


def filled(ttl_s: float | str, *uses: tuple[str, int], gpu: int = 12, until: int = 1) -> SmallCache:
    """Words used by sessions from second 1 on, 0.4 s apart; then the clock goes on at ``until``."""
    cache = small_cache(gpu=gpu, eviction=lambda: TimeToLive(ttl_s=ttl_s))
    cache.clock = count(1, 0.1)  # type: ignore[assignment]
    for word, session in uses:
        cache.use(word, session=session)
    cache.clock = count(until)
    return cache


def test_what_no_session_used_leaves_first() -> None:
    assert filled(100, ("a", 0), ("b", -1), ("c", 1), until=10).leaving_order() == "bac"


def test_expired_nodes_leave_first_and_then_all_by_recency() -> None:
    """a is used by a session that ended before b was used by none."""
    uses = ("a", 0), ("b", -1), ("c", 1)
    assert filled(20, *uses, until=10).leaving_order() == "bac"
    assert filled(20, *uses, until=60).leaving_order() == "abc"


def test_a_copy_below_is_protected_from_the_end_of_its_request() -> None:
    cache = small_cache(gpu=3, cpu=6, eviction=lambda: TimeToLive(ttl_s=100))
    cache.use("a", session=0)
    lease = cache.run("b", session=-1)
    assert [node.notes[1] is None for node in offered(cache.tiers[1].eviction, 9.0)] == [False, True]
    cache.finish(lease)
    assert [node.notes[1] < 9 for node in offered(cache.tiers[1].eviction, 9.0)] == [True, False]


def test_old_expiries_are_forgotten() -> None:
    cache = small_cache(gpu=3, eviction=lambda: TimeToLive(ttl_s=1e9))
    for number in range(4000):
        cache.use("abc"[number % 3], session=0)
    assert len(cache.gpu.eviction._expiring) <= 1025


def test_until_enough_pauses_are_known_it_is_two_seconds() -> None:
    uses = ("a", 0), ("b", -1), ("c", 1)
    assert filled("learned", *uses, until=3).leaving_order() == "bac"
    assert filled("learned", *uses, until=7).leaving_order() == "abc"


def test_a_learned_time_covers_the_pauses_that_are_worth_it() -> None:
    """200 turns come 3 ticks after one another. To compute 1000 pages again takes 17 s: that is worth 3 s, one page is not."""
    cache = small_cache(gpu=5000, eviction=lambda: TimeToLive(ttl_s="learned"), slots=False)
    policy = cache.gpu.eviction
    for turn in range(200):
        request = make_request([0], index=turn, session=0)
        policy.on_request(request, 3.0 * turn)
        policy.on_finish(request, cache.tree.root, 3.0 * turn)
    for index, (session, pages) in enumerate(((1, range(1000)), (2, range(2000, 2001))), 500):
        lease = cache.match(make_request(pages, index=index, session=session))
        assert cache.admit(lease, len(pages), 1000.0)
        cache.insert(lease, 1000.0)
        cache.finish(lease, 1001.0)
    notes = {node.pages: node.notes[0] for node in cache.tree.root.descendants()}
    assert notes == {1000: 1004.0, 1: 1001.0}


@pytest.mark.parametrize(("ttl_s", "expected"), [(0, "above 0"), (-1.0, "above 0"), ("never", "a number above 0")])
def test_a_time_to_live_is_positive_or_learned(ttl_s: float | str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"ttl_s must be {expected}, not {ttl_s!r}; or set it to learned"):
        TimeToLive(ttl_s=ttl_s)


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the session of each request, which this trace does not have"):
        TimeToLive().bind(PolicyContext(requests=[make_request([0])]))
