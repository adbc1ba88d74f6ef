"""LRU-K (O'Neil, O'Neil and Weikum: The LRU-K page replacement algorithm for database disk buffering, SIGMOD 1993)."""

from dataclasses import dataclass
from math import inf

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class LRUK(RankedEviction):
    """LRU by the k-th last use instead of the last one: a second look at a page weighs more than a first one.

    used less than k times        leave first, least recently used first
    used k times or more          leave after them, the one whose k-th last use is longest ago first

    Uses count from when the pages came to the tier. Uses that follow closely are not taken for one (the paper's correlated
    reference period is 0), and what has left the cache is forgotten (its retained information period is 0).
    """

    k: int = 2

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, (node.last_used,))

    def on_hit(self, node: Node, now: float) -> None:
        notes, tier = node.notes, self.tier
        notes[tier] = (*notes[tier], now)[-self.k :]

    def rank(self, node: Node) -> tuple[float, float]:
        uses = node.notes[self.tier]
        return uses[0] if len(uses) == self.k else -inf, node.last_used
