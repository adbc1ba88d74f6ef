"""The queue of policies that rank each node on its own: it takes the same decisions as one that sorts everything anew."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsim.core.tree import Node, RadixTree
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy, RankedEviction
from kvsim.policies.eviction.lru import LRU
from tests.core.small import SmallCache, small_cache


@dataclass(kw_only=True, eq=False)
class SortsAnew(EvictionPolicy):
    """LRU without a queue: looks at all leaves for each victim."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.leaves: dict[Node, None] = {}

    def on_evictable(self, node: Node) -> None:
        self.leaves[node] = None

    def victims(self, now: float) -> Iterator[Node]:
        while leaves := [node for node in self.leaves if node.is_evictable(self.tier)]:
            yield min(leaves, key=lambda node: (node.last_used_in(self.tier), -node.depth))


@dataclass(kw_only=True, eq=False)
class AlikeInThrees(RankedEviction):
    """Many nodes have the same rank; ``kind`` is the type of a rank."""

    kind: Any = float

    def rank(self, node: Node) -> Any:
        return self.kind(node.hits % 3)


@dataclass(kw_only=True, eq=False)
class EntersAnew(AlikeInThrees):
    """Never puts an entry back to its old place."""

    def _stays_first(self, node: Node, rank: Any) -> bool:
        return False


def trees_left(cache: SmallCache, words: list[tuple[str, int]]) -> list[str]:
    """The pages on the GPU after each request, which takes a few pages more than its prompt has."""
    left: list[str] = []
    cache.clock = count(1.0)
    for word, more in words:
        cache.use(word, pages=min(len(word) + more, cache.gpu.pool.capacity))
        left.append(cache.on("gpu"))
    return left


WORDS = st.lists(st.tuples(st.text("abc", min_size=1, max_size=6), st.integers(0, 5)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(WORDS)
def test_lru_takes_the_leaf_that_was_used_least_recently(words: list[tuple[str, int]]) -> None:
    assert trees_left(small_cache(gpu=9, eviction=LRU), words) == trees_left(small_cache(gpu=9, eviction=SortsAnew), words)


@pytest.mark.parametrize("kind", [float, int, lambda rank: rank / 2 or 0])
@settings(max_examples=40, deadline=None)
@given(words=WORDS)
@example(words=[("a", 0), ("aaa", 0), ("aaa", 0), ("baaaaa", 0), ("bb", 0), ("a", 1)])  # a victim that was cut while it waited
def test_an_entry_that_keeps_its_place_changes_no_order(kind: Any, words: list[tuple[str, int]]) -> None:
    kept, anew = (small_cache(gpu=9, eviction=lambda make=make: make(kind=kind)) for make in (AlikeInThrees, EntersAnew))
    assert trees_left(kept, words) == trees_left(anew, words)


def test_a_victim_that_stays_in_part_is_next_again() -> None:
    cache = small_cache(gpu=8, eviction=LRU)
    cache.clock = count(1.0)
    cache.use("abcd")
    cache.use("xyz")
    queue = cache.gpu.eviction
    cache.use("pq")
    entry = queue.line[queue.head]
    assert cache.on("gpu") == "abcxyzpq" and entry[2] is cache.node("abc")
    cache.use("rs")
    assert cache.on("gpu") == "axyzpqrs" and queue.line[queue.head] is entry


def test_entries_near_the_end_of_the_line_stay_in_order() -> None:
    policy = AlikeInThrees()
    policy.bind(PolicyContext(page_tokens=16))
    node = RadixTree(1).root
    ranks = [*map(float, range(1000)), 990.0, 985.5, 985.5, 999.0, 744.0, 743.5, 10.0]
    for place, rank in enumerate(ranks):
        policy._enter(rank, place, node)
    assert len(policy.heap) == 3 and policy.line == sorted(policy.line, key=lambda entry: entry[:2])
    assert [policy._next_entry()[:2] for _ in ranks] == sorted((rank, place) for place, rank in enumerate(ranks))
