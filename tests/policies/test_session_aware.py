"""Session-aware eviction by hand. ``tests/core/page_rules.py`` has its rule page by page."""

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.session_aware import SessionAware
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request


def filled(*uses: tuple[str, int], **sizes: int) -> SmallCache:
    """Words, each used by the next request of a session."""
    cache = small_cache(**{"gpu": 20, **sizes}, eviction=SessionAware)
    for index, (word, session) in enumerate(uses):
        cache.use(word, session=session, index=index)
    return cache


def test_what_the_next_prompt_leaves_behind_leaves_first() -> None:
    """Session 0 revises its prompt: cd is superseded, though x was used before it."""
    assert filled(("x", 1), ("abcd", 0), ("abef", 0)).leaving_order() == "dcxfeba"


def test_a_prompt_that_grows_supersedes_nothing() -> None:
    assert filled(("ab", 0), ("x", 1), ("abc", 0)).leaving_order() == "xcba"


def test_requests_without_a_session_are_superseded_at_once() -> None:
    assert filled(("a", 0), ("b", -1), ("c", -1)).leaving_order() == "bca"


def test_who_used_a_page_last_decides() -> None:
    """Session 1 has used ab last, and goes on with it; what session 0 does since then does not matter."""
    assert filled(("ab", 0), ("abx", 1), ("c", 0), ("d", 2)).leaving_order() == "xbacd"
    assert filled(("ab", 0), ("abx", 1), ("c", 1), ("d", 0)).leaving_order() == "xbacd", "now all of it is superseded"


def test_a_request_that_runs_keeps_its_pages_and_supersedes_nothing() -> None:
    cache = filled(("abc", 0), ("x", 1))
    lease = cache.run("ade", session=0, index=2)
    assert offered(cache.gpu.eviction, 99.0) == [cache.node("abc"), cache.node("x")]
    cache.finish(lease)
    assert cache.leaving_order() == "cbxeda"


def test_a_copy_below_is_superseded_too() -> None:
    cache = filled(("abc", 0), ("x", 1), ("y", 2), gpu=3, cpu=9)
    assert offered(cache.tiers[1].eviction, 99.0)[0] is cache.node("abc")
    cache = filled(("x", 1), ("abc", 0), ("ad", 0), gpu=3, cpu=9)
    assert offered(cache.tiers[1].eviction, 99.0)[0] is cache.node("abc")


def test_samples_of_a_prompt_do_not_supersede_each_other() -> None:
    cache = small_cache(gpu=20, eviction=SessionAware)
    cache.use("x", session=1, index=0)
    for word in ("abc", "abd"):
        cache.use(word, session=0, index=1)
    assert cache.leaving_order() == "xcdba"
    cache = small_cache(gpu=20, eviction=SessionAware)
    for word, index in (("x", 0), ("abc", 1), ("abd", 1), ("ae", 2)):
        cache.use(word, session=int(word != "x"), index=index)
    assert cache.leaving_order() == "cdbxea"


def test_what_is_left_of_a_superseded_path_is_found() -> None:
    """uv takes the room of cd; then session 0 goes on with x."""
    cache = filled(("abcd", 0), ("xy", 1), ("uv", 2), gpu=6)
    policy = cache.gpu.eviction
    assert policy.rank(cache.node("ab"))[0] is True
    cache.use("x", session=0, index=3)
    assert policy.rank(cache.node("ab"))[0] is False
    assert cache.leaving_order() == "bayvux"


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the session of each request, which this trace does not have"):
        SessionAware().bind(PolicyContext(requests=[make_request([0])]))
