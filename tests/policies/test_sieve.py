"""SIEVE by hand."""

from kvsim.policies.eviction.sieve import Sieve
from tests.policies.small import filled


def test_the_hand_spares_what_was_used_since_it_came_by() -> None:
    cache = filled(Sieve(), *"abcad", gpu=3)
    assert cache.on("gpu") == "acd"


def test_the_hand_goes_on_where_it_was_and_begins_anew_at_the_end() -> None:
    cache = filled(Sieve(), *"abcade", gpu=3)
    assert cache.on("gpu") == "ade", "the hand had passed a, so c was next"
    assert cache.leaving_order() == "dea"


def test_it_spares_once() -> None:
    cache = filled(Sieve(), *"abab", "c", gpu=2)
    assert cache.on("gpu") == "bc", "both had the bit; a was the first to be looked at again"


def test_pages_above_that_were_visited_too_lose_the_bit_with_the_leaf() -> None:
    cache = filled(Sieve(), "ab", "ab", "cd", gpu=4)
    cache.use("x")
    assert cache.on("gpu") == "abcx"
    assert cache.leaving_order() == "cxba"
