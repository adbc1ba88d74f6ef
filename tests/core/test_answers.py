"""A policy can be wrong, a result cannot: what breaks its contract ends the run with an error that names it."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from kvsim.core.answers import PolicyError, number, truth, whole_number, whole_numbers
from kvsim.core.pool import UNLIMITED
from kvsim.core.tree import Node, RadixTree
from kvsim.policies.eviction.base import EvictionPolicy, RankedEviction
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import SmallCache, small_cache


class Offering(EvictionPolicy):
    """Offers what a test says, whatever can leave."""

    offers: Callable[[], Any]

    def on_evictable(self, node: Node) -> None:
        """Remembers nothing."""

    def victims(self, now: float) -> Any:
        return self.offers()


def cache_with(offers: Callable[[SmallCache], Any]) -> SmallCache:
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
    assert "2 more pages must leave, and 2 still can" in problem(cache_with(lambda cache: iter([cache.node("abcd")])))


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
        cache.transfers.eviction.make_room(cache.gpu, 1, 100.0)


def test_an_evicted_node_is_refused_however_often_it_is_offered() -> None:
    def offers(cache: SmallCache) -> Iterator[Node]:
        node = cache.node("abcd")
        while True:
            yield node

    assert problem(cache_with(offers)).endswith("it is not in the tier, or was offered before")


def made_by_hand(cache: SmallCache) -> Node:
    """A node that looks like the leaf ``cd`` and is none."""
    leaf = cache.node("abcd")
    node = Node(leaf.runs, leaf.pages, leaf.depth, leaf.parent, RadixTree(1), 0.0)
    node.state, node.slots = leaf.state.copy(), leaf.slots.copy()
    return node


def of_another_cache(cache: SmallCache) -> Node:
    other = small_cache(gpu=4)
    other.use("abcd")
    return other.node("abcd")


@pytest.mark.parametrize("make", [made_by_hand, of_another_cache])
def test_a_node_of_another_tree_is_refused(make: Callable[[SmallCache], Node]) -> None:
    cache = cache_with(lambda cache: iter([make(cache)]))
    assert problem(cache).endswith("it is not in the tree of this cache")


def test_a_node_from_before_a_reset_is_refused() -> None:
    old: list[Node] = []
    cache = cache_with(lambda cache: iter(old))
    old.append(cache.node("abcd"))
    cache.reset()
    cache.use("wxyz")
    assert problem(cache, "stuv").endswith("it is not in the tree of this cache")


@pytest.mark.parametrize("thing", [None, "abcd", 7, ["ab"]])
def test_what_is_not_a_node_is_refused(thing: Any) -> None:
    message = problem(cache_with(lambda cache: iter([thing])))
    assert message == f"the eviction policy of the gpu tier, Offering, offered {thing!r}, which is not a node"


@pytest.mark.parametrize("thing", [None, 7, 1.5])
def test_victims_that_do_not_come_one_after_another_are_refused(thing: Any) -> None:
    message = problem(cache_with(lambda cache: thing))
    assert f"Offering, returned {thing!r} from victims(), not an iterable of nodes" in message


def test_victims_may_be_a_list() -> None:
    cache = cache_with(lambda cache: [cache.node("abcd"), cache.node("ab")])
    cache.use("wxyz")
    assert cache.on("gpu") == "wxyz"


def test_an_error_inside_victims_is_raised_as_it_is() -> None:
    def offers(cache: SmallCache) -> Iterator[Node]:
        yield cache.node("abcd")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache_with(offers).use("wxyz")


class Cutting(LRU):
    """Cuts what a test says before the first victim."""

    def victims(self, now: float) -> Iterator[Node]:
        self.cut(*self.cuts)
        yield from super().victims(now)


@pytest.mark.parametrize("pages", [0, 2, -1, 1.0, None])
def test_a_policy_that_cuts_where_nothing_can_be_cut_is_refused(pages: Any) -> None:
    policy = Cutting()
    cache = small_cache(gpu=4, eviction=[lambda: policy])
    cache.use("ab")
    policy.cuts = cache.node("ab"), pages
    message = problem(cache)
    assert message.startswith("the eviction policy of the gpu tier, Cutting, called cut(Node(")
    assert message.endswith(f", {pages}): cut() takes a node of this cache and a whole number of pages, from 1 to 1 for this one")


def test_a_policy_that_cuts_a_node_of_another_cache_is_refused() -> None:
    policy = Cutting()
    cache = small_cache(gpu=4, eviction=[lambda: policy])
    cache.use("ab")
    policy.cuts = of_another_cache(cache), 1
    assert "cut() takes a node of this cache" in problem(cache)


class Repeating(LRU):
    """Offers its first victim for ever."""

    def victims(self, now: float) -> Iterator[Node]:
        return repeat(next(super().victims(now)))


@pytest.mark.parametrize("watermark", [0.0, 0.5])
def test_an_offer_that_is_repeated_for_ever_ends_the_run(watermark: float) -> None:
    cache = small_cache(gpu=4, cpu=8, eviction=[Repeating, LRU], placement=lambda: WriteBack(watermark=watermark))
    with pytest.raises(PolicyError, match=r"Repeating, offered a node that cannot leave, .* offered before$"):
        use_all(cache, "a", "b", "c", "d", "wxyz")


def use_all(cache: SmallCache, *words: str) -> None:
    for word in words:
        cache.use(word)


class Ranked(RankedEviction):
    """Ranks every node alike, until told otherwise."""

    value: Any = 5.0

    def rank(self, node: Node) -> Any:
        return self.value


NAN = float("nan")


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (5.0, NAN, "must be comparable, not NaN"),
        (NAN, NAN, "must be comparable, not NaN"),
        ((1, NAN), (1, NAN), "must be comparable, not NaN"),
        (None, None, "as None: is a return missing?"),
        (5.0, 4.0, "lowered the rank of Node.* from 5.0 to 4.0 while"),
        ((2, 5.0), (1, 6.0), r"lowered the rank of Node.* from \(2, 5.0\) to \(1, 6.0\) while"),
    ],
)
def test_ranks_that_are_none_or_fall_are_refused(first: Any, then: Any, why: str) -> None:
    with pytest.raises(PolicyError, match=f"^the eviction policy Ranked .*{why}"):
        use_ranked(Ranked(), first, then, "wxyz")


@pytest.mark.parametrize("word", ["wxyz", "yz"])
@pytest.mark.parametrize(
    ("first", "then"),
    [(5.0, "ab"), (5.0, (5.0, 1)), ((1, None), (1, 2)), ("ab", 5.0), (np.array([1, 2]), np.array([1, 2]))],
)
def test_ranks_that_cannot_be_compared_are_refused(first: Any, then: Any, word: str) -> None:
    """``wxyz`` evicts the first node, whose rank is now another one; ``yz`` is a second node beside it."""
    with pytest.raises(PolicyError, match=r"^the eviction policy Ranked .* ranks must be comparable with each other$") as error:
        use_ranked(Ranked(), first, then, word)
    assert f" as {first!r}" in str(error.value) and f" as {then!r}" in str(error.value)


def use_ranked(policy: Ranked, first: Any, then: Any, word: str) -> None:
    """Serve ``ab``, which gets the first rank, and then a word while the rank of all nodes is the other one."""
    policy.value = first
    cache = small_cache(gpu=4, eviction=[lambda: policy])
    cache.use("ab")
    policy.value = then
    cache.use(word)


def test_an_error_inside_rank_is_raised_as_it_is() -> None:
    class Broken(RankedEviction):
        def rank(self, node: Node) -> Any:
            return node.last_used + None

    with pytest.raises(TypeError, match="unsupported operand"):
        small_cache(gpu=4, eviction=Broken).use("ab")


@pytest.mark.parametrize("pages", [0, -1, None, 1.0])
def test_a_part_of_a_victim_has_at_least_a_page(pages: Any) -> None:
    class InParts(LRU):
        def pages_before(self, node: Node, next_rank: Any) -> Any:
            return pages

    cache = small_cache(gpu=4, eviction=InParts)
    cache.use("ab")
    cache.use("cd")
    assert f"InParts returned {pages} from pages_before(), not a whole number of at least 1" in problem(cache)


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


# --- answers one by one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "answer", "taken"),
    [
        (truth, True, True),
        (truth, np.bool_(False), False),
        (partial(whole_number, most=9), 9, 9),
        (partial(whole_number, most=9), np.int64(0), 0),
        (partial(whole_numbers, most=9), (3, np.int64(1)), [3, 1]),
        (number, 2, 2.0),
        (number, np.float32(0.5), 0.5),
        (number, float("inf"), float("inf")),
    ],
)
def test_a_right_answer_is_taken_as_it_is(check: Callable[..., Any], answer: Any, taken: Any) -> None:
    assert check("the policy Mine", "ask()", answer) == taken


@pytest.mark.parametrize(
    ("check", "answer", "expected"),
    [
        (truth, None, "None from ask(), not True or False: is a return missing?"),
        (truth, 1, "1 from ask(), not True or False"),
        (partial(whole_number, most=9), 10, "10 from ask(), not a whole number of at least 0 and at most 9"),
        (partial(whole_number, most=9, least=1), 0, "0 from ask(), not a whole number of at least 1 and at most 9"),
        (partial(whole_number, most=UNLIMITED), -1, "-1 from ask(), not a whole number of at least 0"),
        (partial(whole_number, most=9), True, "True from ask(), not a whole number of at least 0 and at most 9"),
        (partial(whole_number, most=9), 2.0, "2.0 from ask(), not a whole number of at least 0 and at most 9"),
        (partial(whole_numbers, most=9), 3, "3 from ask(), not a list of whole numbers"),
        (partial(whole_numbers, most=9), [3, 10], "10 from ask(), not a whole number of at least 0 and at most 9"),
        (number, -0.5, "-0.5 from ask(), not a number of at least 0"),
        (number, float("nan"), "nan from ask(), not a number of at least 0"),
        (number, False, "False from ask(), not a number of at least 0"),
        (partial(number, most=1.0), 1.5, "1.5 from ask(), not a number of at least 0 and at most 1"),
    ],
)
def test_a_wrong_answer_says_who_gave_it_and_what_was_expected(check: Callable[..., Any], answer: Any, expected: str) -> None:
    with pytest.raises(PolicyError) as error:
        check("the policy Mine", "ask()", answer)
    assert str(error.value) == f"the policy Mine returned {expected}"
