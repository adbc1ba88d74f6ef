"""BeladyCompute by hand, its look ahead page by page, and where it is refused."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.core.request import Request, Reset
from kvsim.errors import UsageError
from kvsim.plans.combinations import check_unforeseen
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.belady_compute import BeladyCompute
from kvsim.policies.eviction.foresight import NEVER, Foresight
from tests.composing import plan
from tests.core.small import MODEL, SmallCache, offered, small_cache
from tests.workloads import branching_requests, make_requests, pages_of

LONG = "abcdefghijklmnopqrsuvwABCDEFGHIJKLMNOPQR"
SETTINGS = ("replay.hold_output=false", "rules.recompute_last_token=false", "model=tiny")


def hits(prompts: str, capacity: int, eviction: str = "belady_compute") -> list[int]:
    trace = kvsim.load_trace("words", page_tokens=1, prompts=[" ".join(word) for word in prompts.split()])
    overrides = (*SETTINGS, f"tiers.gpu.capacity={capacity}pages", f"eviction={eviction}")
    return [int(pages) for pages in kvsim.replay(trace, *overrides).hit_pages[:, 0]]


def test_what_is_used_next_stays() -> None:
    """When ``d`` comes, ``c`` is used next, ``a`` after it and ``b`` never again; LRU would have lost ``a``."""
    assert hits("a b c d c a", 3) == [0, 0, 0, 0, 1, 1]
    assert hits("a b c d c a", 3, "lru") == [0, 0, 0, 0, 1, 0]


def known(*words: str, served: int) -> SmallCache:
    """A cache that has served the first requests of a trace which its policy knows."""
    cache = small_cache(gpu=60, eviction=BeladyCompute)
    requests = [cache.request(word, index=at) for at, word in enumerate(words)]
    cache.gpu.eviction.bind(PolicyContext(requests=requests, model=MODEL, page_tokens=1))
    for at, word in enumerate(words[:served]):
        cache.use(word, index=at)
    return cache


def test_compute_outweighs_a_use_that_is_little_farther() -> None:
    """x is used in one request, the long prompt in two; but its last page saves 1,152 + 32 * 40 FLOPs, x 1,152 + 32."""
    cache = known(LONG, "x", "x", LONG, served=2)
    policy, deep, shallow = cache.gpu.eviction, cache.node(LONG), cache.node("x")
    assert policy.score(deep, 9.0) == pytest.approx(-2 / 2432) and policy.score(shallow, 9.0) == pytest.approx(-1 / 1184)
    assert offered(policy, 9.0)[0] is shallow


def test_without_a_use_ahead_compute_counts_for_nothing() -> None:
    cache = known(LONG, "x", "z", "x", served=2)
    assert cache.gpu.eviction.score(cache.node(LONG), 9.0) == -inf
    assert offered(cache.gpu.eviction, 9.0)[0] is cache.node(LONG)


def test_only_pages_with_the_same_next_use_leave_together() -> None:
    """Of abcd, cd is never used again, ab is."""
    cache = known("abcd", "ab", served=1)
    victims = cache.gpu.eviction.victims(9.0)
    assert next(victims) is cache.node("abcd") and cache.gpu.eviction.most_pages == 2


def test_a_use_that_has_passed_is_followed_by_the_next() -> None:
    cache = known("a", "a", "b", "b", "a", served=4)
    assert cache.gpu.eviction.score(cache.node("a"), 9.0) == pytest.approx(-1 / 1184)
    assert cache.node("a").notes[0].user == 1, "the last use so far"


def slow_next(requests: list[Request], request: int, end: int) -> int:
    page = pages_of(requests[request].runs)[end - 1]
    later = (number for number in range(request + 1, len(requests)) if page in pages_of(requests[number].runs))
    return next(later, NEVER)


@given(requests=branching_requests())
@settings(max_examples=40)
def test_next_users_are_those_of_looking_through_all_requests(requests: list[Request]) -> None:
    future = Foresight(requests)
    for number, request in enumerate(requests):
        following = [slow_next(requests, number, end) for end in range(1, request.prompt_pages + 1)]
        for end, user in enumerate(following, 1):
            assert future.next_user(number, end) == user
            alike = future.pages_alike(number, end)
            assert set(following[end - alike : end]) == {user}
            assert alike == end or following[end - alike - 1] != user
        for page in pages_of(request.runs):
            assert future.first_user(page) == min(at for at, one in enumerate(requests) if page in pages_of(one.runs))


@given(requests=branching_requests(), step=st.integers(2, 5))
@settings(max_examples=20)
def test_users_are_known_by_their_index_as_those_of_a_sample_need_it(requests: list[Request], step: int) -> None:
    future, sampled = Foresight(requests), Foresight([replace(one, index=7 + step * one.index) for one in requests])
    for request in requests:
        for end in range(1, request.prompt_pages + 1):
            user = future.next_user(request.index, end)
            assert sampled.next_user(7 + step * request.index, end) == (NEVER if user == NEVER else 7 + step * user)
            assert sampled.pages_alike(7 + step * request.index, end) == future.pages_alike(request.index, end)
        for page in pages_of(request.runs):
            assert sampled.first_user(page) == 7 + step * future.first_user(page)


def test_a_page_that_no_request_has_has_no_user() -> None:
    assert Foresight(make_requests(["ab"])).first_user(-5) == NEVER


def test_what_is_used_next_after_a_reset_is_of_no_use() -> None:
    """Before ``a`` comes back, the cache is emptied."""
    cache = small_cache(gpu=60, eviction=BeladyCompute)
    requests = [cache.request(word, index=at) for at, word in enumerate(["a", "b", "b", "a"])]
    requests[3] = replace(requests[3], resets=(Reset("drain", 3.0),))
    cache.gpu.eviction.bind(PolicyContext(requests=requests, model=MODEL, page_tokens=1))
    cache.use("a", index=0)
    cache.use("b", index=1)
    assert cache.gpu.eviction.score(cache.node("a"), 9.0) == -inf
    assert cache.gpu.eviction.score(cache.node("b"), 9.0) > -inf


def test_requests_that_nobody_knows_in_advance_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^eviction: BeladyCompute must know all requests in advance: choose another policy"):
        check_unforeseen(plan("eviction=belady_compute"))
    check_unforeseen(plan("eviction=random_compute"))
