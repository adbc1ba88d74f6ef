"""Retention directives by hand. ``tests/core/page_rules.py`` has their rule page by page."""

from itertools import count
from math import inf

import pytest

from kvsim.core.request import RetentionRange
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.retention import RetentionPriority
from tests.core.small import SmallCache, small_cache
from tests.workloads import make_request

Said = tuple[int, int, int, float]


def filled(*uses: tuple[str, tuple[Said, ...]], until: float = 1000, page_tokens: int = 1, gpu: int = 20) -> SmallCache:
    """Words used from second 1 on, 0.1 s between two steps, with directives; then the clock goes on at ``until``."""
    cache = small_cache(gpu=gpu, eviction=RetentionPriority, page_tokens=page_tokens)
    cache.clock = count(1, 0.1)  # type: ignore[assignment]
    for word, said in uses:
        cache.use(word, retention=tuple(RetentionRange(*one) for one in said))
    cache.clock = count(until)  # type: ignore[assignment]
    return cache


def test_the_lowest_priority_leaves_first_and_35_is_that_of_silence() -> None:
    uses = ("a", ((0, 1, 36, inf),)), ("b", ((0, 1, 34, inf),)), ("c", ()), ("d", ((0, 1, 100, inf),))
    assert filled(*uses).leaving_order() == "bcad"


def test_a_range_covers_some_pages_of_a_prompt() -> None:
    """The system prompt ab stays, cd is as usual, ef is worth nothing: x comes between."""
    uses = ("abcdef", ((0, 2, 100, inf), (4, 6, 0, inf))), ("x", ())
    assert filled(*uses).leaving_order() == "fedcxba"


def test_the_first_token_of_a_page_decides() -> None:
    """Pages of 4 tokens: the range from token 2 to 9 holds the first tokens of the second and the third page."""
    uses = ("abcd", ((2, 9, 10, inf),)), ("x", ((0, 4, 20, inf),))
    assert filled(*uses, page_tokens=4).leaving_order() == "xdcba"


def test_a_duration_begins_when_the_request_ends() -> None:
    """a lasts until 1.2 + 50 s, b until about 1.5 + 20 s."""
    uses = ("a", ((0, 1, 80, 50.0),)), ("b", ((0, 1, 90, 20.0),)), ("c", ())
    assert filled(*uses, until=10).leaving_order() == "cab"
    assert filled(*uses, until=40).leaving_order() == "cba"
    assert filled(*uses, until=100).leaving_order() == "cba", "a counts as used when it lost its priority, after b"


def test_a_low_priority_ends_too() -> None:
    uses = ("a", ()), ("b", ((0, 1, 0, 20.0),)), ("c", ())
    assert filled(*uses, until=10).leaving_order() == "bac"
    assert filled(*uses, until=30).leaving_order() == "acb"


def test_the_last_directive_replaces_the_one_before() -> None:
    high, low = (0, 1, 90, inf), (0, 1, 10, inf)
    assert filled(("a", (high,)), ("b", ()), ("a", (low,))).leaving_order() == "ab"
    assert filled(("a", (low,)), ("b", ()), ("a", (high,))).leaving_order() == "ba"


def test_without_a_directive_a_priority_stays_and_has_no_end_any_more() -> None:
    uses = ("a", ((0, 1, 90, 5.0),)), ("b", ()), ("a", ()), ("c", ())
    assert filled(*uses, until=100).leaving_order() == "bca"


def test_what_follows_the_prompt_has_a_directive_of_its_own() -> None:
    assert filled(("x", ()), ("abcd", ((2, 1 << 60, 5, inf),))).leaving_order() == "dcxba"


def test_settings_and_directives_are_checked() -> None:
    with pytest.raises(ValueError, match=r"default_priority must be .* not 101"):
        RetentionPriority(default_priority=101)
    with pytest.raises(ValueError, match="needs retention directives, which this trace does not have"):
        RetentionPriority().bind(PolicyContext(requests=[make_request([0])]))


def test_old_ends_are_forgotten() -> None:
    uses = [("abc"[number % 3], ((0, 1, 40 + number % 9, 1e9),)) for number in range(4000)]
    assert len(filled(*uses, gpu=3).gpu.eviction._expiring) <= 1025
