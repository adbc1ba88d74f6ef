"""A policy can be wrong, a result cannot: what breaks its contract ends the run with an error that names it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvsim.core.tier import PolicyError
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import EvictionPolicy, RankedEviction
from kvsim.policies.eviction.lru import LRU
from tests.core.small import SmallCache, small_cache


class Offering(EvictionPolicy):
    """Offers what a test says, whatever can leave."""

    offers: Callable[[], Iterator[Node]]

    def on_evictable(self, node: Node) -> None:
        """Remembers nothing."""

    def victims(self, now: float) -> Iterator[Node]:
        return self.offers()


def cache_with(offers: Callable[[SmallCache], Iterator[Node]]) -> SmallCache:
    """A GPU of four pages that hold ``abcd``, with ``ab`` and ``cd`` nodes of their own."""
    policy = Offering()
    cache = small_cache(gpu=4, eviction=[lambda: policy])
    cache.use("ab")
    cache.use("abcd")
    policy.offers = lambda: offers(cache)
    return cache


def problem(cache: SmallCache, word: str = "wxyz") -> str:
    with pytest.raises(PolicyError) as error:
        cache.use(word)
    return str(error.value)


def test_a_policy_that_offers_nothing_does_not_make_the_cache_larger() -> None:
    message = problem(cache_with(lambda cache: iter(())))
    assert message.startswith("the eviction policy of the gpu tier, Offering, offered too few victims: 4 more pages must leave")


def test_a_policy_that_stops_too_early_is_named() -> None:
    assert "2 more pages must leave, and 2 could" in problem(cache_with(lambda cache: iter([cache.node("abcd")])))


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        (lambda cache: iter([cache.node("ab")]), "it has children in the tier"),
        (lambda cache: iter([cache.node("abcd")] * 2), "it is not in the tier, or was offered before"),
    ],
)
def test_what_cannot_leave_is_refused(offers: Callable[[SmallCache], Iterator[Node]], why: str) -> None:
    message = problem(cache_with(offers))
    assert "Offering, offered a node that cannot leave" in message and message.endswith(why)


def test_a_pinned_node_is_refused() -> None:
    cache = cache_with(lambda cache: iter([cache.node("abcd")]))
    lease = cache.look("abcd", prompt_tokens=9)
    assert cache.admit(lease, 4, 99.0)
    cache.gpu.evictable_pages += 1  # as if something else could leave
    with pytest.raises(PolicyError, match="it is pinned"):
        cache.transfers.make_room(cache.gpu, 1, 100.0)


def test_an_evicted_node_is_refused_however_often_it_is_offered() -> None:
    def offers(cache: SmallCache) -> Iterator[Node]:
        node = cache.node("abcd")
        while True:
            yield node

    assert problem(cache_with(offers)).endswith("it is not in the tier, or was offered before")


class Ranked(RankedEviction):
    """Ranks every node alike, until told otherwise."""

    value: Any = 5.0

    def rank(self, node: Node) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "must be comparable, not NaN"), (4.0, "lowered the rank"), ((5.0, float("nan")), None)]
)
def test_ranks_that_are_not_numbers_or_fall_are_refused(value: Any, why: str | None) -> None:
    policy = Ranked()
    cache = small_cache(gpu=4, eviction=[lambda: policy])
    cache.use("ab")
    policy.value = value
    with pytest.raises(PolicyError if why else (PolicyError, TypeError), match=why):
        cache.use("wxyz")


def test_a_rank_that_rises_is_right() -> None:
    policy = Ranked()
    cache = small_cache(gpu=4, eviction=[lambda: policy])
    cache.use("ab")
    policy.value = 6.0
    cache.use("wxyz")
    assert cache.on("gpu") == "wxyz"


def test_a_right_policy_is_not_refused() -> None:
    cache = small_cache(gpu=4, eviction=LRU)
    cache.use("abcd")
    assert cache.use("wxyz") == (0, 0, 0) and cache.on("gpu") == "wxyz"
