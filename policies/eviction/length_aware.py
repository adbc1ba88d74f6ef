"""Length-aware eviction (Qin et al.: Mooncake, FAST 2025, ``LengthAwareCache``)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from kvsim.core.pool import UNLIMITED
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.policies.eviction.base import DEPTH, EvictionPolicy

MOST_END: Final = 2.0**28
"""Longer than any path, in pages. Ranks are exact up to 2**25 hits."""


Entry = tuple[float, float, Node]
"""A leaf: (last use, place among equals, node). Equals lie on one path; the deepest leaves first."""


def rank_of(node: Node, tier: int) -> float:
    """Return the rank: fewer hits first, then the later end. The lowest leaves first."""
    return node.hits_in(tier) * MOST_END - node.depth - node.pages


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LengthAware(EvictionPolicy):
    """LFU that evicts the ends of long prompts first, since fewer requests reach them than share the beginning.

    fewer hits               leaves first
    equal hits, ends later   leaves first
    equal hits and end       least recently used first

    Leaves of equal rank share a heap. A victim loses one page or, if it is alone at its rank, all pages that end behind the
    other leaves, and then enters the next heap. Entries whose leaf has left, or ranks higher now, are dropped or corrected
    when they reach the front.
    """

    def __post_init__(self) -> None:
        self._heaps: dict[float, list[Entry]] = {}
        """Entries by rank; no heap is empty."""
        self._ranks: list[float] = []
        """A heap of the ranks of ``_heaps``."""
        self._entries = 0
        self._made = 0
        self._compact_at = 1024

    def on_evictable(self, node: Node) -> None:
        self._made += 1
        self._enter(rank_of(node, self.tier), (node.last_used_in(self.tier), self._made - node.depth * DEPTH, node))
        if self._entries > self._compact_at:
            self._compact()

    def _enter(self, rank: float, entry: Entry) -> None:
        self._entries += 1
        heap = self._heaps.get(rank)
        if heap is None:
            self._heaps[rank] = [entry]
            heappush(self._ranks, rank)
        else:
            heappush(heap, entry)

    def _compact(self) -> None:
        """Keep one entry per leaf."""
        places: dict[Node, float] = {}
        for heap in self._heaps.values():
            for _, place, node in heap:
                if node.is_evictable(self.tier) and place <= places.get(node, place):
                    places[node] = place
        self._heaps.clear()
        self._ranks.clear()
        self._entries = 0
        for node, place in places.items():
            self._enter(rank_of(node, self.tier), (node.last_used_in(self.tier), place, node))
        self._compact_at = max(1024, 2 * self._entries)

    def victims(self, now: float) -> Iterator[Node]:
        tier, heaps, ranks = self.tier, self._heaps, self._ranks
        while ranks:
            rank = ranks[0]
            heap = heaps[rank]
            entry = heappop(heap)
            if not heap:
                del heaps[rank]
                heappop(ranks)
            self._entries -= 1
            node = entry[2]
            if node.state[tier] != READY or node.pins[tier] or node.children_in[tier]:
                continue
            now_ranked = rank_of(node, self.tier)
            if node.last_used_in(self.tier) != entry[0] or now_ranked != rank:
                self._enter(now_ranked, (node.last_used_in(self.tier), entry[1], node))
                continue
            self.most_pages = 1 if heap else self._pages_alone(node, rank)
            yield node

    def _pages_alone(self, node: Node, rank: float) -> int:
        """Return how many pages a leaf that is alone at its rank loses before another leaf is due."""
        if not self._ranks:
            return UNLIMITED
        following = self._ranks[0]
        pages = int(following - rank)
        return pages + 1 if node.last_used_in(self.tier) < self._heaps[following][0][0] else pages
