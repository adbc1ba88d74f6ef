"""LRU-K (O'Neil, O'Neil and Weikum: The LRU-K page replacement algorithm for database disk buffering, SIGMOD 1993)."""

from dataclasses import dataclass
from math import inf

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LRUK(RankedEviction):
    """LRU by the k-th last use instead of the last one: repeated use counts for more than a single recent use.

    used fewer than k times   leave first, least recently used first
    used k times or more      leave after them, earliest k-th last use first

    Uses are counted from when the pages enter the tier. Uses in quick succession are not merged (the paper's correlated
    reference period is 0), and pages that have left are forgotten (its retained information period is 0).
    """

    k: int = 2

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "k")

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, (node.last_used_in(self.tier),))

    def on_hit(self, node: Node, now: float) -> None:
        notes, tier = node.notes, self.tier
        notes[tier] = (*notes[tier], now)[-self.k :]

    def rank(self, node: Node) -> tuple[float, float]:
        uses = node.notes[self.tier]
        return uses[0] if len(uses) == self.k else -inf, node.last_used_in(self.tier)
