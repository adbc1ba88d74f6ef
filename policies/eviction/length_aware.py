"""Length-aware eviction (Qin et al.: Mooncake, FAST 2025, ``LengthAwareCache``)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import NO_LIMIT, READY, Node
from kvsim.policies.eviction.base import DEPTH, EvictionPolicy

MOST_END: Final = 2.0**28
"""No path is so long. Ranks are exact up to 2**25 hits."""


Entry = tuple[float, float, Node]
"""A leaf: last use, place among equals, node. Equals are of one path, of which the deeper ones leave first."""


def rank_of(node: Node) -> float:
    """Hits, and for as many hits the end: the least leaves first."""
    return node.hits * MOST_END - node.depth - node.pages


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LengthAware(EvictionPolicy):
    """LFU that gives up the ends of long prompts first: fewer requests get so far than share the beginning.

    fewer hits                        leaves first
    as many hits, ends later          leaves first
    as many hits, ends at one place   least recently used first

    Leaves of one rank stand in one heap. A victim gives up a page, or as many as end behind all other leaves, and goes on to the
    next heap. Entries whose leaf has gone, or ranks higher now, are dropped or put right when they come to the front.
    """

    def __post_init__(self) -> None:
        self._heaps: dict[float, list[Entry]] = {}
        """By rank; none is empty."""
        self._ranks: list[float] = []
        """A heap of their ranks."""
        self._entries = 0
        self._made = 0
        self._compact_at = 1024

    def on_evictable(self, node: Node) -> None:
        self._made += 1
        self._enter(rank_of(node), (node.last_used, self._made - node.depth * DEPTH, node))
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
        """Keep one entry for each leaf."""
        places: dict[Node, float] = {}
        for heap in self._heaps.values():
            for _, place, node in heap:
                if node.is_evictable(self.tier) and place <= places.get(node, place):
                    places[node] = place
        self._heaps.clear()
        self._ranks.clear()
        self._entries = 0
        for node, place in places.items():
            self._enter(rank_of(node), (node.last_used, place, node))
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
            now_ranked = rank_of(node)
            if node.last_used != entry[0] or now_ranked != rank:
                self._enter(now_ranked, (node.last_used, entry[1], node))
                continue
            self.most_pages = 1 if heap else self._pages_alone(node, rank)
            yield node

    def _pages_alone(self, node: Node, rank: float) -> int:
        """How many pages a leaf gives up before it comes to another one; it is alone at its rank."""
        if not self._ranks:
            return NO_LIMIT
        following = self._ranks[0]
        pages = int(following - rank)
        return pages + 1 if node.last_used < self._heaps[following][0][0] else pages
