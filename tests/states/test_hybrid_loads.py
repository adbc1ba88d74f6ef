"""What a request of a hybrid model begins from when its pages, or the state after them, cannot be loaded or do not arrive."""

from typing import Any

import pytest

from kvsim.core.tree import READY
from kvsim.policies.checkpoint.every_page import EveryPage
from tests.core.small import only
from tests.states.small_hybrid import SmallHybrid, hybrid, use

SHARED, OWN = {"shared_pages": 1, "gpu": 14, "cpu": 40}, {"gpu": 9, "cpu": 40, "states": 9, "cpu_states": 40}
"""States in the memory of pages, and in their own."""
ROOMS = pytest.mark.parametrize("room", [SHARED, OWN], ids=["shared", "own"])


def begun_from(cache: SmallHybrid, lease: Any) -> int:
    """The depth of the state that the request begins from, which the GPU has and keeps; 0 without one."""
    states = lease.states
    if states.state is None:
        return 0
    assert states.tier is cache.states.gpu and states.state.state[0] == READY and states.state.pins[0]
    return int(states.state.depth + states.state.pages)


def reused(lease: Any) -> int:
    return int(lease.gpu_pages + lease.loaded_pages)


def end(cache: SmallHybrid, *leases: Any) -> None:
    """End requests as an engine would; nothing is left behind."""
    for lease in leases:
        cache.move(cache.insert(lease, next(cache.clock)))
        cache.check()
        cache.move(cache.finish(lease))
        cache.check()
    cache.reset()
    for tier in (*cache.tiers, *cache.states.tiers):
        assert tier.pool.free == tier.pool.capacity


def two_requests(room: dict[str, Any]) -> tuple[SmallHybrid, Any, Any]:
    """Two requests for "abc", whose pages and states, one after each page, only the CPU has; neither has begun its load."""
    cache = hybrid(EveryPage(), **room)
    use(cache, "abc", "wxyz")
    cache.leaving_order()
    assert cache.states_on("gpu") == set() and {"a", "ab", "abc"} <= cache.states_on("cpu")
    return cache, cache.admitted("abc"), cache.admitted("abc")


def arrive(cache: SmallHybrid, lease: Any, *, pages: int, state: bool) -> None:
    """Carry out the loads of a request, of which so many pages arrive, and the state if ``state``."""
    for transfer in cache.load(lease, next(cache.clock)).transfers:
        arrives = transfer.pages if transfer.nodes[0].is_state else pages
        if transfer.nodes[0].is_state and not state:
            arrives = 0
        cache.abort(transfer, arrives, next(cache.clock))
        cache.check()


@ROOMS
def test_a_state_that_only_the_cpu_has_is_no_beginning_once_pages_could_not_be_loaded(room: dict[str, Any]) -> None:
    cache, first, second = two_requests(room)
    arrive(cache, first, pages=1, state=True)
    cache.load(second, next(cache.clock))
    assert (reused(second), begun_from(cache, second)) == (0, 0), "the GPU has page a, but not the state after it"
    cache.check()
    end(cache, first, second)


@ROOMS
def test_an_earlier_state_on_the_gpu_is_a_beginning_and_stays(room: dict[str, Any]) -> None:
    cache, first, second = two_requests(room)
    third = cache.admitted("a")
    arrive(cache, third, pages=1, state=True)
    arrive(cache, first, pages=1, state=True)
    assert cache.states_on("gpu") == {"a", "abc"}
    cache.load(second, next(cache.clock))
    assert (reused(second), begun_from(cache, second)) == (1, 1)
    cache.check()
    end(cache, third, first, second)


@ROOMS
def test_a_state_that_another_request_failed_to_load_is_no_beginning(room: dict[str, Any]) -> None:
    """The other request's pages have come."""
    cache, first, second = two_requests(room)
    before = dict(cache.describe_checkpoints())
    arrive(cache, first, pages=3, state=False)
    assert cache.on("gpu").startswith("abc") and cache.states_on("gpu") == set()
    cache.load(second, next(cache.clock))
    assert (reused(second), begun_from(cache, second)) == (0, 0)
    after = cache.describe_checkpoints()
    assert after["used"] == before["used"] - 1
    assert after["tokens_lost_to_missing_state"] == before["tokens_lost_to_missing_state"] + 3
    end(cache, first, second)


@ROOMS
@pytest.mark.parametrize(("pages", "state"), [(3, False), (2, True), (0, True), (0, False)])
def test_a_request_whose_own_loads_fail_begins_from_what_has_arrived(room: dict[str, Any], pages: int, state: bool) -> None:
    cache, first, second = two_requests(room)
    cache.release(second)
    load = cache.load(first, next(cache.clock))
    transfers, loads = load.transfers, load.loads
    assert set(loads) == set(transfers) and reused(first) == 3
    planned, missed = [load.pages for load in loads], 0
    for load, whole in zip(loads, planned, strict=True):
        arrives = state * whole if load.nodes[0].is_state else pages
        cache.abort(load, arrives, next(cache.clock))
        if arrives < whole:
            missed += cache.load(first, next(cache.clock), load).lost_pages
        cache.check()
    assert (reused(first), begun_from(cache, first), missed) == (0, 0, 3)
    assert first.arriving() == []
    end(cache, first)


@ROOMS
def test_two_requests_that_share_the_load_of_a_state_miss_it_together(room: dict[str, Any]) -> None:
    cache, first, second = two_requests(room)
    loads = cache.load(first, next(cache.clock)).loads
    (state,) = [load for load in loads if load.nodes[0].is_state]
    load = cache.load(second, next(cache.clock))
    transfers, shared = load.transfers, load.loads
    assert not transfers and shared == [state] and reused(second) == 3
    cache.move(load for load in loads if load is not state)
    cache.abort(state, 0, next(cache.clock))
    for lease in (first, second):
        assert cache.load(lease, next(cache.clock), state).lost_pages == 3
        assert (reused(lease), begun_from(cache, lease)) == (0, 0)
    end(cache, first, second)


@ROOMS
@pytest.mark.parametrize(("pages", "state"), [(3, True), (2, True), (0, True), (3, False), (0, False)])
def test_a_request_that_waits_for_its_slots_misses_what_anothers_loads_have_failed_to_bring(
    room: dict[str, Any], pages: int, state: bool
) -> None:
    """It was admitted when the loads were under way, and has its slots once they have ended; a state it then loads itself."""
    cache = hybrid(EveryPage(), **room)
    use(cache, "abc", "wxyz")
    cache.leaving_order()
    first = cache.admitted("abc")
    loads = cache.load(first, next(cache.clock)).loads
    planned = [load.pages for load in loads]
    second = cache.admitted("abcd")
    assert reused(second) == 3
    for load, whole in zip(loads, planned, strict=True):
        cache.abort(load, state * whole if load.nodes[0].is_state else pages, next(cache.clock))
        if load.arrived_pages < whole:
            cache.load(first, next(cache.clock), load)
    transfers = cache.load(second, next(cache.clock)).transfers
    cache.check()
    cache.move(transfers)
    left = 3 if pages == 3 else 0
    assert (reused(second), begun_from(cache, second)) == (left, left)
    end(cache, first, second)


@ROOMS
def test_after_a_reset_nothing_is_loaded(room: dict[str, Any]) -> None:
    cache, first, second = two_requests(room)
    cache.release(second)
    cache.reset()
    assert not cache.load(first, next(cache.clock)).transfers
    assert (reused(first), begun_from(cache, first)) == (0, 0)
    cache.check()
    end(cache, first)


def test_detached_states_are_a_beginning_as_long_as_they_last() -> None:
    """The state after "abc" is detached and so is the one after "a"; pages b and c do not come."""
    cache = hybrid(EveryPage(detached=True), gpu=9, cpu=40, states=9)
    use(cache, "abc", "wxyz")
    cache.leaving_order()
    first, second = cache.admitted("abc"), cache.admitted("abc")
    assert first.states.state is None and first.states.detached is not None and reused(first) == 3
    load = only(cache.load(first, next(cache.clock)).transfers)
    cache.abort(load, 1, next(cache.clock))
    assert cache.load(first, next(cache.clock), load).lost_pages == 2
    cache.load(second, next(cache.clock))
    for lease in (first, second):
        assert lease.states.detached == cache.words.ids["a"] and reused(lease) == 1
    end(cache, first, second)


@ROOMS
def test_a_state_whose_pages_cannot_follow_is_loaded_nevertheless(room: dict[str, Any]) -> None:
    """The load has begun when it turns out that another request's load of the pages has failed."""
    cache, first, second = two_requests(room)
    for load in cache.load(first, next(cache.clock)).loads:
        cache.abort(load, 0, next(cache.clock))
        cache.load(first, next(cache.clock), load)
    load = cache.load(second, next(cache.clock))
    transfers, loads = load.transfers, load.loads
    assert [transfer.nodes[0].is_state for transfer in transfers] == [True] and loads == []
    assert (reused(second), begun_from(cache, second)) == (0, 0)
    assert second.arriving() == []
    cache.move(transfers)
    assert cache.states_on("gpu") == {"abc"}
    end(cache, first, second)
