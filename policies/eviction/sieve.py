"""SIEVE (Zhang et al.: SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches, NSDI 2024)."""

from dataclasses import dataclass
from math import inf
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.leaf_queue import Leaf
from kvsim.policies.eviction.queues import Mark, QueueEviction

AHEAD: Final = 0
BEHIND: Final = 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Sieve(QueueEviction):
    """FIFO with a second chance that leaves kept pages in place, so that they do not shield new pages from eviction.

    order    by time of entry. A hit sets the page's visited bit
    hand     moves over the leaves from oldest to newest, then starts again. A visited leaf loses the bit and stays, as do the
             pages above it that entered with it and were visited; an unvisited leaf is the victim
    """

    def __post_init__(self) -> None:
        self.hand = 0
        """The hand's place. Pages at this place are still ahead, unless the hand has passed them in this lap."""
        self.lap = 1

    def enter(self, ghost: None) -> Mark:
        return Mark(0, self.clock, (False, 0))

    def use(self, mark: Mark) -> Mark:
        return Mark(0, mark.place, (True, mark.value[1]))

    def _side(self, mark: Mark) -> int:
        return AHEAD if mark.place > self.hand or mark.place == self.hand and mark.value[1] != self.lap else BEHIND

    def on_evictable(self, node: Node) -> None:
        mark = self.mark(node)
        self.push(self.leaves[self._side(mark)], mark.place, node)

    def is_current(self, queue: int, entry: Leaf) -> bool:
        if not self.is_leaf(entry.node):
            return False
        mark = self.mark(entry.node)
        return mark.place == entry.place and self._side(mark) == queue

    def first(self, queue: int) -> Node | None:
        leaves = self.leaves[queue]
        while (entry := leaves.first()) is not None and not self.is_current(queue, entry):
            leaves.remove(entry)
        return None if entry is None else entry.node

    def choose(self) -> tuple[int, float] | None:
        while True:
            leaf = self.first(AHEAD)
            if leaf is not None:
                mark = self.mark(leaf)
                self.hand = mark.place
                if not mark.value[0]:
                    return AHEAD, inf
                self.move(leaf, Mark(0, self.hand, (False, self.lap)))
            elif self.first(BEHIND) is not None:
                self.leaves.reverse()
                self.hand, self.lap = 0, self.lap + 1
            else:
                return None
