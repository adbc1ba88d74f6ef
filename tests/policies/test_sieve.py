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
